"""Notebooks are saved so that their panels are seen again, as widgets or as pictures.

A panel (helpers.panels) is one output with two forms, a widget and a picture. JupyterLab saves the
state of those widgets whose kernel is there, and drops that of all others. A trusted notebook would
then show "Error displaying widget: model not found", although the picture is in the same output.
"""

from typing import Any

VIEW = "application/vnd.jupyter.widget-view+json"
STATE = "application/vnd.jupyter.widget-state+json"


def keep_pictures(model: dict[str, Any], **_: Any) -> None:
    """Take widgets without a saved state out of outputs that have another form.

    A `pre_save_hook` of Jupyter Server; model is what is about to be saved, and is changed.
    """
    if model["type"] != "notebook" or not model.get("content"):
        return
    notebook = model["content"]
    saved = notebook.get("metadata", {}).get("widgets", {}).get(STATE, {}).get("state", {})
    for cell in notebook.get("cells", []):
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            forms = set(data) - {VIEW, "text/plain"}
            if VIEW in data and forms and data[VIEW].get("model_id") not in saved:
                del data[VIEW]
