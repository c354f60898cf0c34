"""Style sheets of reports and charts, with colours for light and dark pages."""

from __future__ import annotations

COLOURS = """
:root {
  --page: #fbfaf8; --card: #ffffff; --ink: #1d2125; --soft: #59626b; --line: #dfe1e4;
  --strong: #b9bec4; --first: #0b6a93; --second: #b8450f;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171a; --card: #1c2024; --ink: #e7e9eb; --soft: #a3acb5; --line: #30363c;
    --strong: #525a62; --first: #62c3ea; --second: #ff9c66;
  }
}
"""

CHART = """
svg text { fill: var(--ink); }
.grid line { stroke: var(--line); }
.grid line.strong { stroke: var(--strong); }
.grid text { fill: var(--soft); font-variant-numeric: tabular-nums; }
svg .axis { font-size: 14px; }
.series0 circle, .series0 path, .series1 circle, .series1 path {
  stroke: var(--card); stroke-width: 1.5;
}
.mark text, .enlarged text { font-weight: 600; }
.series0 circle, .series0 path { fill: var(--first); }
.series1 circle, .series1 path { fill: var(--second); }
.series0 .ring, .series1 .ring { fill: none; stroke: var(--first); stroke-width: 2; }
.series1 .ring { stroke: var(--second); }
.tie { fill: none; stroke: var(--strong); stroke-width: 1; }
.panel { fill: var(--card); stroke: var(--strong); }
.frontier { fill: none; stroke: var(--soft); stroke-width: 1.5; stroke-dasharray: 5 4; }
"""

PAGE = """
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif;
}
main { max-width: 66rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 2rem; line-height: 1.2; margin: 0 0 .75rem; letter-spacing: -.015em; }
h2 { font-size: 1.3rem; margin: 2.75rem 0 .9rem; }
.notes {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr));
  gap: 1.1rem 2.5rem;
}
h3 { font-size: 1rem; margin: 0 0 .1rem; }
p { margin: 0; max-width: 46rem; }
.lead { font-size: 1.1rem; color: var(--soft); }
.lead strong { color: var(--ink); }
figure { margin: 0; }
figcaption, caption { color: var(--soft); font-size: .9rem; }
figcaption { margin-top: .6rem; }
caption { text-align: left; padding: 0 0 .6rem; }
.wide {
  overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 1rem;
}
.wide:focus-visible { outline: 2px solid var(--first); outline-offset: 2px; }
svg { display: block; width: 100%; min-width: 620px; height: auto; font-size: 13px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td {
  text-align: right; padding: .42rem .6rem; border-bottom: 1px solid var(--line);
  white-space: nowrap;
}
.figures { font-size: .93rem; }
.figures th, .figures td { padding-inline: .5rem; }
thead th {
  color: var(--soft); font-weight: 600; font-size: .9rem; border-bottom-color: var(--strong);
}
th:first-child { text-align: left; }
tbody th { font-weight: 600; }
tbody tr:last-child > * { border-bottom: 0; }
tr.base > * { background: color-mix(in srgb, var(--line) 35%, transparent); }
abbr { text-decoration: underline dotted var(--strong); text-underline-offset: 3px; cursor: help; }
.error { color: var(--soft); font-size: .88em; }
.stages th { white-space: normal; }
.stages td { vertical-align: top; }
.stages code {
  display: block; font-weight: 400; color: var(--soft); font-size: .84rem; overflow-wrap: anywhere;
}
.stages tfoot > tr > * { border-top: 1px solid var(--strong); border-bottom: 0; font-weight: 600; }
code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
dl {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(14rem, 1fr)); gap: 1rem 1.5rem;
  margin: 2rem 0 0;
}
dt { color: var(--soft); font-size: .85rem; }
dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 40rem) {
  main { padding: 1.25rem .75rem 3rem; }
  .wide { padding: .6rem; }
  svg { min-width: 0; font-size: 15px; }
  .figures, .figures caption, .figures tbody, .figures th { display: block; }
  .figures thead { display: none; }
  .figures tr {
    display: grid; grid-template-columns: 1fr 1fr; padding: .5rem 0;
    border-bottom: 1px solid var(--strong);
  }
  .figures tbody th { grid-column: 1 / -1; }
  .figures th, .figures td { border: 0; padding: .1rem .4rem; white-space: normal; }
  .figures td::before { content: attr(data-label); float: left; color: var(--soft); }
}
"""

# A chart that is drawn for wide pages, and again for narrow ones.
TWO_CHARTS = """
.narrow { display: none; }
@media (max-width: 40rem) {
  .broad { display: none; }
  .narrow { display: block; }
  .narrow svg { font-size: 13px; }
}
"""

TOKENS = """
.tokens {
  background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: .7rem 1rem; margin: 0 0 .75rem;
}
.tokens summary { cursor: pointer; font-weight: 600; overflow-wrap: anywhere; }
.tokens summary:focus-visible { outline: 2px solid var(--first); outline-offset: 2px; }
.tokens ol { margin: .75rem 0 0; padding-left: 1.6rem; }
.tokens h3 { margin: 1rem 0 0; }
.tokens li { margin: 0 0 .8rem; }
.tokens li::marker { color: var(--soft); }
.tokens p { overflow-wrap: anywhere; max-width: none; }
.tokens .context { color: var(--soft); font-size: .93rem; }
.tokens mark {
  background: color-mix(in srgb, var(--second) 22%, transparent); color: var(--ink);
  border-radius: 3px; padding: 0 .15em;
}
.tokens code { white-space: pre-wrap; }
.figures .error { white-space: nowrap; }
h1, h2, .lead { overflow-wrap: anywhere; }
.figures tbody th { overflow-wrap: anywhere; white-space: normal; min-width: 9rem; }
"""
