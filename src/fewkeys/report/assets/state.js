"use strict";
// What is shown, and who is told when that changes.
const data = JSON.parse(document.getElementById("data").textContent);
const rows = data.rows;
const $ = (id) => document.getElementById(id);

const methods = [...new Set(rows.map((row) => row.name))];
const budgets = [...new Set(rows.map((row) => row.budget).filter((budget) => budget !== null))].sort((a, b) => a - b);
const label = (row) => (row.budget === null ? row.name : `${row.name}, ${row.budget} slots`);
const best = rows.filter((row) => row.kind === "method").reduce((a, b) => (a && a.error <= b.error ? a : b), null);
const start = data.crossing?.row ?? Math.max(0, rows.indexOf(best));
const rival = rows.findIndex((row) => row.kind === "oracle" && row.budget === rows[start].budget);

const state = {
  methods: new Set(methods),
  budgets: new Set(budgets),
  plans: [start, rival < 0 ? 0 : rival],
  layer: rows[start].worst[0],
  head: rows[start].worst[1],
  query: 0,
};
const listeners = [];
function change(more) {
  Object.assign(state, more);
  for (const listener of listeners) listener(Object.keys(more));
}
const visible = (row) => state.methods.has(row.name) && (row.budget === null || state.budgets.has(row.budget));

// An element with attributes and children; text is never read as HTML.
function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") node.style.cssText = value;
    else if (name.startsWith("aria-")) node.setAttribute(name, String(value));
    else if (value !== false && value !== null) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}
const fixed = (number, digits) => (number === null ? "–" : number.toFixed(digits));

// Light and dark: as the system says, until somebody presses the button.
const system = matchMedia("(prefers-color-scheme: dark)");
function setTheme(dark, chosen) {
  if (chosen) document.documentElement.className = dark ? "dark" : "light";
  $("theme").setAttribute("aria-pressed", dark);
  change({ dark });
}
system.addEventListener("change", (event) => setTheme(event.matches, false));
$("theme").addEventListener("click", () => setTheme(!state.dark, true));
setTheme(system.matches, false);
