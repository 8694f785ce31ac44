"""The look of the report, in dark and in light."""

CSS = """
:root { color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --text: #1b1f27; --soft: #59616f; --edge: #dfe3ea; --grid: #e8ebf0;
  --c1: #2563eb; --c2: #d97706; --c3: #0f766e; --c4: #9333ea; --bad: #c81e1e; --good: #15803d; }
@media (prefers-color-scheme: dark) { :root {
  --page: #101318; --card: #191d24; --text: #e8ebf1; --soft: #a3adbd; --edge: #2d333d; --grid: #272c35;
  --c1: #6ea2ff; --c2: #f2a93b; --c3: #3ec9b5; --c4: #c48bff; --bad: #ff7a74; --good: #58d08a; } }
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif }
main { max-width: 1240px; margin: 0 auto; padding: 28px 20px 60px }
h1 { font-size: 26px; margin: 0 0 4px; line-height: 1.25; overflow-wrap: anywhere }
h2 { font-size: 19px; margin: 36px 0 12px }
h3 { font-size: 15px; margin: 0 0 6px; font-weight: 600 }
p { margin: 0 0 10px } .soft { color: var(--soft) } .bad-text { color: var(--bad); font-weight: 600 }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 12px; margin: 14px 0 }
.card { margin: 0; background: var(--card); border: 1px solid var(--edge); border-radius: 10px; padding: 14px 16px;
  min-width: 0 }
.card dt { color: var(--soft); font-size: 13px; margin: 0 }
.card dd { margin: 2px 0 0; font-size: 21px; font-weight: 650; font-variant-numeric: tabular-nums; line-height: 1.2 }
.card dd small { font-size: 13px; font-weight: 400; color: var(--soft) }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 14px;
  margin: 14px 0 }
figure { margin: 0; background: var(--card); border: 1px solid var(--edge); border-radius: 10px; padding: 14px 14px 8px;
  min-width: 0 }
figure.wide { margin: 14px 0 } .wide .scroll { border: 0 } .wide .plot { min-width: 760px }
figcaption { font-weight: 600; font-size: 14px; margin-bottom: 6px }
.plot { display: block; width: 100%; height: auto; font: 12px system-ui, sans-serif }
.tick { fill: var(--soft); font-size: 11.5px } .label { fill: var(--soft) } .key { fill: var(--text); font-size: 12px }
.point { fill: var(--soft); font-size: 11px }
.grid { stroke: var(--grid) } .axis { stroke: var(--soft) }
.mark { stroke: var(--text); stroke-dasharray: 3 3; stroke-width: 1.2 }
.line { fill: none; stroke: var(--c); stroke-width: 2.2; stroke-linejoin: round } .dot { fill: var(--c) }
.area { fill: var(--c); opacity: .16 } .bar { fill: var(--c) }
.c1 { --c: var(--c1) } .c2 { --c: var(--c2) } .c3 { --c: var(--c3) } .c4 { --c: var(--c4) } .bad { --c: var(--bad) }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--edge); border-radius: 10px }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
caption { text-align: left; padding: 12px 14px 4px; font-weight: 600; font-size: 14px }
th, td { padding: 7px 14px; text-align: right; white-space: nowrap; border-top: 1px solid var(--grid) }
thead th { color: var(--soft); font-weight: 500; font-size: 13px; border-top: 0 }
th:first-child, td.text { text-align: left } tbody th { font-weight: 600 } td.text { white-space: normal }
details { margin: 14px 0 } summary { cursor: pointer; font-weight: 600; padding: 4px 0 }
summary:focus-visible, .scroll:focus-visible { outline: 2px solid var(--c1); outline-offset: 3px }
dl.options { display: grid; grid-template-columns: max-content 1fr; gap: 2px 18px; margin: 10px 0; font-size: 14px }
dl.options dt { color: var(--soft) } dl.options dd { margin: 0; overflow-wrap: anywhere }
tbody th .soft { font-weight: 400; margin-left: 6px }
details.run { border-top: 1px solid var(--edge); margin: 0; padding: 14px 0 } details.run > summary { font-size: 16px }
details.run > summary .soft { font-weight: 400; font-size: 14px; margin-left: 10px }
@media print { body { background: #fff } figure, .card { break-inside: avoid } }
"""
