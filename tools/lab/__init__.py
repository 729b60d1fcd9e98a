"""What `make lab` adds to JupyterLab: settings, in overrides.json, and how notebooks are saved."""
