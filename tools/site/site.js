/* What scrolls sideways can be reached by keyboard, as the theme does for code. */
"use strict";
const SCROLLING = ".cell_output, .cell_output .output, .cell_output table, .bd-article p:has(> img)";
function reachable() {
  for (const part of document.querySelectorAll(SCROLLING))
    if (part.scrollWidth > part.clientWidth) part.tabIndex = 0;
    else part.removeAttribute("tabindex");
}
/* The theme's visible buttons open nothing: the one that opens a sidebar stands in a header that is hidden. */
function openable(kind) {
  const [works, ...others] = document.querySelectorAll(`.${kind}-toggle`);
  for (const button of others) button.addEventListener("click", () => works.click());
}
window.addEventListener("load", () => ["primary", "secondary"].forEach(openable));
window.addEventListener("load", reachable);
window.addEventListener("resize", reachable);
