"""Sphinx's settings for the site. Nothing here, and nothing it names, uses a network."""

project = "Tight Fit"
author = "The authors of Tight Fit"
language = "en"
extensions = ["myst_nb", "sphinx_copybutton", "tools.site.render"]

nb_execution_mode = "off"  # outputs are those that were saved
nb_ipywidgets_js = {}
nb_number_source_lines = False
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 4
myst_links_external_new_tab = True
suppress_warnings = ["myst.header", "misc.highlighting_failure"]
html_math_renderer = "mathml"
math_number_all = False

html_theme = "sphinx_book_theme"
html_title = "Tight Fit"
html_show_sourcelink = False
html_copy_source = False
html_use_index = False
html_show_search_summary = False  # they are fetched, which a page that is a file may not
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_theme_options = {
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "home_page_in_toc": True,
    "navigation_with_keys": False,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
copybutton_exclude = ".linenos, .gp, .go"
copybutton_prompt_text = "$ "
