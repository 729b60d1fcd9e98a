/* Search: a page that says what was asked more often comes first, with the place where it says it.
   TEXTS, {page: its text}, is written when the site is built, as a page opened as a file may fetch nothing. */
"use strict";
const ASKED = (new URLSearchParams(location.search).get("q") || "").trim().toLowerCase();
const WORDS = ASKED.split(/\s+/).filter((word) => word.length > 2);
const textOf = (page) => TEXTS[page] || "";
const times = (text, part) => (part ? text.toLowerCase().split(part).length - 1 : 0);

function weight(page, title) {
  const phrase = times(textOf(page), ASKED);
  const rarest = WORDS.length ? Math.min(...WORDS.map((word) => times(textOf(page), word))) : 0;
  return 100 * times(title, ASKED) + 10 * Math.log2(1 + phrase) + 2 * Math.log2(1 + rarest);
}

function excerpt(page) {
  const text = textOf(page), small = text.toLowerCase();
  const stems = WORDS.map((word) => word.replace(/(ing|ed|es|s)$/, ""));  // the search takes these for the same
  const found = [ASKED, ...WORDS, ...stems].map((part) => small.indexOf(part)).find((place) => place >= 0) || 0;
  const begin = Math.max(0, small.lastIndexOf(" ", found - 90) + 1);
  const words = document.createElement("p");
  words.className = "context";
  words.textContent = `${begin ? "… " : ""}${text.slice(begin, begin + 240)} …`;
  return words;
}

var Scorer = {
  score: ([page, title, , , score]) => score + weight(page, title),
  objNameMatch: 11, objPartialMatch: 6, objPrio: { 0: 15, 1: 5, 2: -5 }, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
const pageOf = (url) => {
  const [path] = url.split(/[?#]/), root = new URL("search.html", location.href).href.slice(0, -11);
  return decodeURI(new URL(path, location.href).href.slice(root.length)).replace(/\.html$/, "");
};
window.fetch = (url) => Promise.resolve({ text: () => Promise.resolve(pageOf(String(url))) });
document.addEventListener("DOMContentLoaded", () => { Search.makeSearchSummary = excerpt; });
