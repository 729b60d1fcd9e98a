/* What scrolls sideways can be reached by keyboard, as the theme does for code. */
"use strict";
const SCROLLING = ".cell_output, .cell_output .output, .cell_output table, .bd-article p:has(> img)";
function reachable() {
  for (const part of document.querySelectorAll(SCROLLING))
    if (part.scrollWidth > part.clientWidth) part.tabIndex = 0;
    else part.removeAttribute("tabindex");
}
window.addEventListener("load", reachable);
window.addEventListener("resize", reachable);
