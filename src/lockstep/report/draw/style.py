"""How the page looks: colours as variables, for light and dark screens and for paper."""

from __future__ import annotations

LIGHT = """
color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --raised: #f5f7f9; --line: #d5dae0; --grid: #e6e9ed;
--quiet: #56606c; --good: #1a7f37; --bad: #c8322f; --warn: #9a6700;
--c0: #2563b8; --c1: #7fb0e8; --c2: #2e9e6b; --c3: #e8892b; --c4: #b9a3e3;
--c5: #d2403d; --c6: #8a5a2b; --c7: #e3b505; --c8: #4db6c4; --c9: #a7afb9;
"""
DARK = """
--ink: #e6e9ed; --paper: #14171b; --raised: #1c2026; --line: #3a414a; --grid: #2a3038;
--quiet: #a0a9b4; --good: #56c271; --bad: #ff6b64; --warn: #e0a83c;
--c0: #5b9bf0; --c1: #2f5f9c; --c2: #3fb884; --c3: #f09a45; --c4: #8b74c4;
--c5: #ef5b57; --c6: #b98450; --c7: #d9b32e; --c8: #2f8f9e; --c9: #6d7681;
"""
COLOURS = 10
TEXT = """
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); overflow-wrap: anywhere;
  margin: 0 auto; max-width: 78rem; padding: 1rem clamp(.75rem, 3vw, 2rem) 4rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .8rem 0 .2rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .8rem; padding-top: .9rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
p { margin: .4rem 0; max-width: 72ch; }
a { color: var(--c0); }
.quiet, small { color: var(--quiet); font-size: 13px; font-weight: normal; }
.good { color: var(--good); }
.bad { color: var(--bad); }
.warn { color: var(--warn); }
.status { display: inline-block; font-size: 13px; font-weight: 600; white-space: nowrap; vertical-align: 3px;
  border: 1px solid currentColor; border-radius: 1rem; padding: .05rem .7rem; margin-left: .5rem; }
nav { font-size: 14px; margin: 1rem 0 0; }
nav a { display: inline-block; margin-right: 1rem; }
details { margin: .5rem 0; }
summary { cursor: pointer; color: var(--c0); }
"""
ANSWER = """
.answer { border-left: 4px solid var(--c0); border-radius: 0 .4rem .4rem 0; background: var(--raised);
  padding: .5rem 1rem; margin: 1rem 0; }
.answer.bad { border-color: var(--bad); color: inherit; }
.answer > div { display: grid; grid-template-columns: 7rem minmax(0, 1fr); margin: .45rem 0; }
.answer h2 { all: unset; color: var(--quiet); font-size: 13px; font-weight: 600; padding-top: .32rem; }
.answer p { max-width: 90ch; margin: .2rem 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(7.9rem, 1fr)); gap: .6rem; margin: 1rem 0; }
.tiles div { background: var(--raised); border-radius: .4rem; padding: .45rem .75rem; }
.tiles b { display: block; font-size: 1.15rem; line-height: 1.35; font-weight: 600; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.tiles span { color: var(--quiet); font-size: 13px; }
"""
CHART = """
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem 2rem; }
figure { margin: 0 0 .6rem; min-width: 0; break-inside: avoid; }
figcaption { font-weight: 600; margin-bottom: .3rem; }
.plot { display: grid; grid-template: 11.5rem 1.5rem / 4.3rem minmax(0, 1fr); }
.wide { margin-top: 1.2rem; }
.wide .plot { grid-template-rows: 14rem 1.5rem; }
.y, .x, .area { position: relative; }
.x { grid-column: 2; }
.y span, .x span { position: absolute; font-size: 12px; line-height: 1; color: var(--quiet); white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.y span { right: .45rem; transform: translateY(50%); }
.x span { top: .4rem; transform: translateX(-50%); }
.x span.e { transform: translateX(-100%); }
.area svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible; }
.area path { vector-effect: non-scaling-stroke; }
.area b { position: absolute; top: 0; bottom: 0; width: 0; border-left: 1px solid var(--quiet); display: none; }
.area output { position: absolute; top: .2rem; z-index: 1; display: none; pointer-events: none; white-space: pre;
  font-size: 12px; background: var(--paper); border: 1px solid var(--line); border-radius: .3rem; padding: 0 .5rem; }
.on b, .on output { display: block; }
.grid { fill: none; stroke: var(--grid); stroke-width: 1; }
[data-s] .grid { stroke: var(--ink); stroke-opacity: .12; }
.line { fill: none; stroke-width: 1.6; stroke-linejoin: round; stroke-linecap: round; }
.pale { stroke-width: 1; stroke-opacity: .38; }
.mark { fill: none; stroke: var(--bad); stroke-width: 1; stroke-dasharray: 2 3; }
.broken { fill: none; stroke: var(--bad); stroke-width: 2; }
.legend { margin: .4rem 0 0; line-height: 1.4; max-width: none; }
.legend span { display: inline-block; margin-right: 1rem; color: var(--quiet); font-size: 13px; }
.legend i { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin-right: .35rem;
  vertical-align: -1px; }
"""
TABLE = """
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: .5rem 0; font-size: 14px; }
td, th { padding: .25rem .8rem .25rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
th { color: var(--quiet); font-weight: 600; font-size: 13px; }
td { min-width: 5.5rem; max-width: 34rem; }
td.w { min-width: 13rem; }
td.r, th.r { min-width: 0; text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.bars { margin: .6rem 0; font-size: 14px; }
.bar { display: grid; grid-template: "name bar text" / 10rem minmax(0, 1fr) 9.5rem; gap: .1rem .7rem;
  align-items: center; margin: .3rem 0; }
.bar div { grid-area: bar; display: flex; height: 1.15rem; background: var(--raised); border-radius: 2px;
  overflow: hidden; }
.bar span { grid-area: name; line-height: 1.25; }
.bar span + span { grid-area: text; font-variant-numeric: tabular-nums; }
.time { margin: .6rem 0 1.8rem; }
.lane { display: grid; grid-template-columns: 6.2rem minmax(0, 1fr); align-items: center; min-height: 1.7rem;
  font-size: 13px; }
.lane > div { position: relative; height: 1.2rem; background: var(--raised); overflow: hidden; }
.lane.x > div { background: none; overflow: visible; }
.lane i { position: absolute; top: 0; bottom: 0; min-width: 2px; overflow: hidden; }
.lane i.dot { width: 3px; margin-left: -1px; }
.lane i em { font: 12px/1.2rem system-ui, sans-serif; color: #fff; padding-left: .3rem; text-shadow: 0 0 2px #000; }
"""
NARROW = """
.answer { padding: .4rem .8rem; }
.answer > div { display: block; }
.plot { grid-template-columns: 3.9rem minmax(0, 1fr); }
.tiles { grid-template-columns: repeat(auto-fill, minmax(6.4rem, 1fr)); }
.tiles div { padding: .4rem .55rem; }
.tiles b { font-size: 1rem; }
.bar { grid-template: "name text" "bar bar" / minmax(0, 1fr) auto; }
.bar div { height: .8rem; }
.lane { grid-template-columns: 5.6rem minmax(0, 1fr); }
"""
PAPER = """
* { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
body { max-width: none; font-size: 11pt; padding: 0; }
nav { display: none; }
h2 { break-after: avoid; }
.charts { grid-template-columns: 1fr 1fr; }
"""


def _fills_and_strokes() -> str:
    """``s0``, ... for lines, ``f0``, ... for areas and boxes."""
    return "\n".join(
        f".s{one} {{ stroke: var(--c{one}); }} .f{one} {{ fill: var(--c{one}); background: var(--c{one}); }}"
        for one in range(COLOURS)
    )


STYLE = f"""
:root {{ {LIGHT} }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ {DARK} }} }}
{TEXT}{ANSWER}{CHART}{TABLE}{_fills_and_strokes()}
@media (max-width: 480px) {{ {NARROW} }}
@media print {{ {PAPER} }}
"""
