"""Style and script of the page of `stats_report`."""

STYLE = """
:root {
  --page: #fbfaf8; --card: #ffffff; --ink: #1d2125; --soft: #59626b;
  --line: #dfe1e4; --strong: #b9bec4; --focus: #0b6a93;
  --mean: #f6f6f4; --under: #1f6fa3; --over: #b5472f; --on-deep: #ffffff;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171a; --card: #1c2024; --ink: #e7e9eb; --soft: #a3acb5;
    --line: #30363c; --strong: #525a62; --focus: #62c3ea;
    --mean: #262b30; --under: #6fb7e4; --over: #f0937c; --on-deep: #101417;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif;
}
main { max-width: 100rem; margin: 0 auto; padding: 2.5rem 1.25rem 6rem; }
h1 {
  font-size: clamp(1.5rem, 5vw, 2rem); line-height: 1.2; margin: 0 0 .75rem;
  letter-spacing: -.015em;
}
h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1.25rem 0 .25rem; }
.lead { margin: 0; max-width: 48rem; color: var(--soft); }
.note { margin: 0 0 .5rem; color: var(--soft); font-size: .85rem; }
.cards {
  display: grid; gap: .75rem; margin: 1.5rem 0 0;
  grid-template-columns: repeat(auto-fit, minmax(min(11rem, 100%), 1fr));
}
.card {
  background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: .6rem .9rem; min-width: 0;
}
.card span, .card small { display: block; color: var(--soft); overflow-wrap: anywhere; }
.card b { font-size: 1.35rem; font-variant-numeric: tabular-nums; }
.legend { max-width: 24rem; margin: 1.5rem 0 0; font-size: .85rem; color: var(--soft); }
.bar {
  height: .8rem; border-radius: 4px; border: 1px solid var(--line);
  background: linear-gradient(in oklab to right, var(--under), var(--mean), var(--over));
}
.ticks { display: flex; justify-content: space-between; font-variant-numeric: tabular-nums; }
.panels {
  display: grid; gap: 0 2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(30rem, 100%), 1fr));
}
.panel { min-width: 0; }
.choice { margin: 1.5rem 0 0; }
select { font: inherit; padding: .25rem .5rem; max-width: 100%; }
.worst { margin: 0; padding-left: 1.5rem; }
.worst b { font-weight: 600; overflow-wrap: anywhere; }
.wide {
  overflow: auto; max-height: 85vh; background: var(--card); border: 1px solid var(--line);
  border-radius: 10px;
}
.wide:focus-visible, button:focus-visible, select:focus-visible {
  outline: 2px solid var(--focus); outline-offset: 2px;
}
table {
  width: 100%; border-collapse: separate; border-spacing: 0; font-size: .85rem;
  font-variant-numeric: tabular-nums;
}
th, td { padding: .25rem .55rem; text-align: right; }
td { white-space: nowrap; }
th { font-weight: 600; background: var(--card); }
thead th {
  position: sticky; top: 0; z-index: 2; border-bottom: 1px solid var(--strong);
  vertical-align: bottom;
}
th:first-child {
  position: sticky; left: 0; z-index: 1; text-align: left; border-right: 1px solid var(--line);
}
thead th:first-child { z-index: 3; }
tbody th { font-weight: 400; }
.all tbody th { min-width: 7rem; overflow-wrap: anywhere; }
.map th, .map td { padding: .15rem .3rem; text-align: center; }
.map thead th { padding-top: .5rem; }
.map thead span {
  writing-mode: vertical-rl; transform: rotate(180deg); max-height: 11rem; overflow-wrap: anywhere;
}
small { font-weight: 400; color: var(--soft); }
button {
  all: unset; cursor: pointer; display: block; width: 100%; white-space: nowrap;
}
button small { display: block; }
th[aria-sort="ascending"] button::after { content: " \\2191"; }
th[aria-sort="descending"] button::after { content: " \\2193"; }
td { border: 1px solid var(--card); }
td.under { background: color-mix(in oklab, var(--under) var(--p, 0%), var(--mean)); }
td.over { background: color-mix(in oklab, var(--over) var(--p, 0%), var(--mean)); }
td.deep { color: var(--on-deep); }
td.none, td.plain { background: none; color: var(--soft); }
td.none { text-align: center; }
dl {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(14rem, 100%), 1fr));
  gap: 1rem 1.5rem; margin: 2rem 0 0;
}
dt { color: var(--soft); font-size: .85rem; }
dd { margin: 0; overflow-wrap: anywhere; }
output {
  position: fixed; left: 0; right: 0; bottom: 0; z-index: 4; padding: .6rem 1.25rem;
  background: var(--card); border-top: 1px solid var(--strong); font-size: .85rem;
  overflow-wrap: anywhere;
}
@media (max-width: 40rem) {
  main { padding: 1.25rem .75rem 7rem; }
  table { font-size: .78rem; }
  th, td { padding: .25rem .35rem; }
}
"""

# Sorting, the choice of a type, and the figures of a cell at the lower edge of the window. `title`
# shows them late on a desktop, and never on a telephone.
SCRIPT = """
"use strict";
for (const [column, head] of document.querySelectorAll(".all thead th").entries()) {
  head.querySelector("button").addEventListener("click", () => {
    const descending = head.getAttribute("aria-sort") === "none" ? column > 0
      : head.getAttribute("aria-sort") === "ascending";
    for (const other of head.parentNode.children) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const body = document.querySelector(".all tbody");
    const value = (row) => Number(row.children[column].dataset.sort);
    const sign = descending ? -1 : 1;
    body.append(...[...body.rows].sort((a, b) => sign * (value(a) - value(b))));
  });
}
const type = document.getElementById("type");
if (type) {
  const show = () => {
    for (const panel of document.querySelectorAll(".panel")) {
      panel.hidden = panel.id !== type.value;
    }
  };
  type.addEventListener("change", show);
  show();
}
const detail = document.getElementById("detail");
const tell = (event) => {
  const cell = event.target.closest("td[title]");
  detail.hidden = !cell;
  if (cell) detail.textContent = cell.title;
};
document.addEventListener("pointerover", tell);
document.addEventListener("click", tell);
"""
