"""Draws the pictures of the lessons: python docs/images/from_scratch/draw.py writes them beside this file.

They are drawn on white paper, so that they can be read on any background. The site inverts them in dark mode.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "from_scratch"))

from pipeline_schedules import gpipe, one_f_one_b, timeline, zero_bubble

STYLE = """
text { font: 13px sans-serif; fill: #222; text-anchor: middle }
.out { fill: #333 } .small { font-size: 11px } .left { text-anchor: start } .title { font-weight: bold }
rect { stroke: #555 } .line { stroke: #666; stroke-width: 1.5; fill: none } .tip { fill: #666 }
.r0 { fill: #8ecae6 } .r1 { fill: #ffd08a } .r2 { fill: #b7e4a7 } .r3 { fill: #f4b6c2 }
.off { fill: #e4e4e4 } .none { fill: none; stroke-dasharray: 3 3 }
.paper { fill: #fff; stroke: none }
"""


class Picture:
    """SVG elements, written down in the order in which they are drawn."""

    def __init__(self, name: str, title: str, width: int, height: int) -> None:
        self.name, self.width, self.height = name, width, height
        self.lines = [f"<title>{title}</title>", f"<style>{STYLE}</style>"]
        self.lines.append(f'<rect class="paper" width="{width}" height="{height}" rx="6"/>')
        self.lines.append(
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path class="tip" d="M0 0L8 4L0 8z"/></marker></defs>'
        )

    def box(self, x: float, y: float, w: float, h: float, label: str = "", kind: str = "off") -> None:
        """Draw a rectangle. ``kind`` is a class of STYLE: r0 to r3 are the colours of the processes."""
        self.lines.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}"/>')
        if label:
            shown = "out small" if kind == "none" else "small"
            self.lines.append(f'<text class="{shown}" x="{x + w / 2:g}" y="{y + h / 2 + 4:g}">{label}</text>')

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        self.lines.append(f'<text class="out {kind}" x="{x:g}" y="{y:g}">{words}</text>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self.lines.append(f'<path class="line" marker-end="url(#tip)" d="M{x1:g} {y1:g}L{x2:g} {y2:g}"/>')

    def save(self) -> None:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}">'
        )
        path = Path(__file__).parent / f"{self.name}.svg"
        path.write_text("\n".join([head, *self.lines, "</svg>", ""]), encoding="utf-8")


def parameter_server() -> None:
    picture = Picture("parameter_server", "One server sends weights and receives gradients", 640, 230)
    picture.box(240, 20, 160, 50, "server: weights, optimizer", "r0")
    for worker in range(3):
        x = 60 + 200 * worker
        picture.box(x, 160, 120, 50, f"worker {worker + 1}: gradient", f"r{worker + 1}")
        middle, top = x + 60, 320 + 40 * (worker - 1)
        picture.arrow(top - 8, 74, middle - 10, 156)
        picture.arrow(middle + 10, 156, top + 8, 74)
    picture.text(130, 108, "weights go down", "small")
    picture.text(515, 108, "gradients come up", "small")
    picture.save()


def ring_all_reduce() -> None:
    picture = Picture("ring_all_reduce", "How many summands each chunk has after each hop", 760, 240)
    summands = [[1] * 4 for _ in range(4)]
    titles = ["start", "hop 1", "hop 2", "hop 3", "hop 4", "hop 5", "hop 6"]
    for number, title in enumerate(titles):
        x = 75 + 97 * number
        picture.text(x + 38, 48, title)
        if 1 <= number <= 3:  # a partial sum meets one more process's chunk
            for rank in range(4):
                summands[rank][(rank - 1 - number) % 4] = number + 1
        if number >= 4:  # a whole sum is copied to the right
            for rank in range(4):
                summands[rank][(rank - (number - 3)) % 4] = 4
        for rank in range(4):
            for chunk in range(4):
                done = summands[rank][chunk]
                kind = "r2" if done == 4 else "r1" if done > 1 else "off"
                picture.box(x + 19 * chunk, 60 + 30 * rank, 19, 24, str(done), kind)
    for rank in range(4):
        picture.text(4, 77 + 30 * rank, f"process {rank}", "small left")
    picture.text(310, 24, "reduce-scatter", "title")
    picture.text(600, 24, "all-gather", "title")
    picture.text(
        380, 212, "each square is a chunk; the number says how many processes it is the sum of", "small"
    )
    picture.save()


def overlap(name: str, title: str, groups: list[list[int]]) -> None:
    """Backward from layer 6 to 1 above, all-reduces of groups of gradients below."""
    picture = Picture(name, title, 700, 170)
    picture.text(6, 52, "compute", "small left")
    picture.text(6, 112, "network", "small left")
    for place, layer in enumerate(range(6, 0, -1)):
        picture.box(80 + 70 * place, 30, 70, 36, f"backward {layer}", f"r{layer % 2}")
    free = 0.0
    for group in groups:
        ready = 80 + 70 * (7 - min(group))
        start, width = max(free, ready), 10 + 45 * len(group)
        label = "all-reduce " + ", ".join(map(str, group)) if len(group) > 1 else f"{group[0]}"
        picture.box(start, 90, width, 36, label, "r2")
        picture.arrow(ready, 68, ready, 88)
        free = start + width
    picture.box(free + 6, 30, 60, 96, "step", "r3")
    picture.text(350, 155, "time goes to the right; numbers are layers", "small")
    picture.save()


def rotating_server() -> None:
    picture = Picture(
        "rotating_server", "The server of a step's gradients is another process each time", 720, 230
    )
    for step in range(6):
        picture.text(140 + 95 * step, 24, f"step {step}")
    for rank in range(4):
        picture.text(8, 58 + 38 * rank, f"process {rank}", "small left")
        for step in range(6):
            serves = step % 4 == rank
            label = f"serves {step}" if serves else f"sends {step}"
            picture.box(98 + 95 * step, 40 + 38 * rank, 85, 28, label, f"r{rank}" if serves else "off")
    for step in range(2, 6):
        picture.text(140 + 95 * step, 212, f"applies {step - 2}", "small")
    picture.text(8, 212, "all, at the end:", "small left")
    picture.save()


def zero(stage: int) -> None:
    """Weights, gradients and Adam's two numbers on four processes; what is split is a quarter as wide."""
    picture = Picture(f"zero{stage}", f"What each process holds in stage {stage}", 720, 180)
    rows = [("weights", 1, 3), ("gradients", 1, 2), ("optimizer state", 2, 1)]
    for rank in range(4):
        picture.text(190 + 152 * rank, 24, f"process {rank}")
    for row, (name, size, split_from) in enumerate(rows):
        y = 38 + 44 * row
        picture.text(6, y + 20, name, "small left")
        for rank in range(4):
            x, whole = 120 + 152 * rank, 68 * size
            picture.box(x, y, whole, 30, "", "none")
            if stage >= split_from:
                picture.box(x + whole / 4 * rank, y, whole / 4, 30, "", f"r{rank}")
            else:
                picture.box(x, y, whole, 30, "all", f"r{rank}")
    picture.save()


def tensor_parallel() -> None:
    picture = Picture("tensor_parallel", "Columns of the first matrix, rows of the second, one sum", 720, 230)
    for x, title in ((50, "inputs"), (170, "columns"), (310, "gelu"), (450, "rows"), (640, "outputs")):
        picture.text(x, 20, title)
    picture.box(20, 40, 60, 144, "x")
    for rank in range(4):
        y = 40 + 38 * rank
        picture.box(120, y, 100, 30, f"columns {rank}", f"r{rank}")
        picture.box(260, y, 100, 30, f"hidden {rank}", f"r{rank}")
        picture.box(400, y, 100, 30, f"rows {rank}", f"r{rank}")
        for x in (82, 222, 362):
            picture.arrow(x, y + 15, x + 35, y + 15)
        picture.arrow(502, y + 15, 545, 112)
    picture.box(548, 92, 44, 40, "sum")
    picture.arrow(594, 112, 608, 112)
    picture.box(610, 40, 60, 144, "y")
    picture.text(360, 214, "each colour is a process; only the sum is communication", "small")
    picture.save()


def pipeline() -> None:
    picture = Picture("pipeline", "Three orders of 8 micro-batches on 4 stages", 760, 470)
    unit, top = 20, 30
    schedules = (("GPipe", gpipe), ("1F1B", one_f_one_b), ("zero bubble", zero_bubble))
    for name, schedule in schedules:
        picture.text(6, top - 8, name, "left title")
        for stage, spans in enumerate(timeline(schedule, 4, 8)):
            y = top + 28 * stage
            picture.text(6, y + 17, f"stage {stage}", "small left")
            for (kind, m), start, end in spans:
                colour = {"F": "r0", "B": "r2", "I": "r2", "W": "r1"}[kind]
                picture.box(60 + unit * start, y, unit * (end - start), 24, str(m), colour)
        top += 150
    for x, kind, label in (
        (60, "r0", "forward"),
        (190, "r2", "backward (or of inputs)"),
        (400, "r1", "of weights"),
    ):
        picture.box(x, 446, 16, 16, "", kind)
        picture.text(x + 22, 459, label, "small left")
    picture.save()


def ring_attention() -> None:
    picture = Picture(
        "ring_attention", "Keys and values go round; causal attention skips later ones", 720, 190
    )
    for step in range(4):
        picture.text(180 + 150 * step, 22, f"hop {step}" if step else "own keys")
    for rank in range(4):
        y = 36 + 36 * rank
        picture.text(6, y + 19, f"queries {rank}", "small left")
        for step in range(4):
            owner = (rank - step) % 4
            seen = owner <= rank
            picture.box(
                120 + 150 * step, y, 120, 28, f"keys {owner}" if seen else f"keys {owner}: later",
                f"r{owner}" if seen else "none",
            )  # fmt: skip
    picture.save()


def expert_parallel() -> None:
    picture = Picture("expert_parallel", "Tokens travel to their experts and back", 640, 250)
    chosen = {0: [0, 3, 5], 1: [2, 3, 6], 2: [1, 4, 7], 3: [0, 5, 6]}
    for rank in range(4):
        y = 30 + 52 * rank
        picture.text(6, y + 18, f"process {rank}", "small left")
        for place, expert in enumerate(chosen[rank]):
            picture.box(80 + 46 * place, y, 42, 28, f"to {expert}", f"r{expert // 2}")
            picture.arrow(216, y + 14, 396, 44 + 52 * (expert // 2))
        picture.box(400, y, 100, 28, f"expert {2 * rank}", f"r{rank}")
        picture.box(504, y, 100, 28, f"expert {2 * rank + 1}", f"r{rank}")
    picture.text(320, 242, "the way back is the same, in the other direction", "small")
    picture.save()


def gradient_checkpointing() -> None:
    picture = Picture(
        "gradient_checkpointing", "Kept for backward: everything, or the inputs of blocks", 700, 190
    )
    for row, (title, kept) in enumerate((("without", True), ("with", False))):
        y = 20 + 90 * row
        picture.text(6, y + 34, title, "left")
        for block in range(6):
            x = 90 + 98 * block
            picture.box(x, y, 16, 56, "", "r0")
            for inside in range(3):
                picture.box(x + 22 + 20 * inside, y + 8, 16, 40, "", "r1" if kept else "none")
    picture.text(
        350,
        182,
        "blue: inputs of blocks; yellow: what is inside; dashed: forgotten, and computed again",
        "small",
    )
    picture.save()


def loss_scaling() -> None:
    picture = Picture(
        "loss_scaling", "The loss scale falls fast, then rises and is halved now and then", 700, 210
    )
    picture.text(6, 20, "loss scale", "small left")
    # Steps at which something overflows; after four good steps the scale doubles.
    overflows, height, good = {0, 1, 2, 7, 12, 17}, 5.0, 0
    for step in range(20):
        x, y = 60 + 30 * step, 150 - 24 * height
        picture.box(x, y, 26, 170 - y, "", "r3" if step in overflows else "r0")
        if step in overflows:
            height, good = height - 1, 0
        else:
            good += 1
            if good == 4:
                height, good = height + 1, 0
    picture.text(
        350,
        196,
        "each bar is a step; in the pink ones something overflowed: skipped, and the scale halved",
        "small",
    )
    picture.save()


def int8_gradients() -> None:
    picture = Picture("int8_gradients", "A block of numbers as small integers and one scale", 700, 150)
    values = ["0.31", "-1.27", "0.04", "0.88", "-0.52", "1.01"]
    integers = ["31", "-127", "4", "88", "-52", "101"]
    picture.text(6, 42, "float32", "small left")
    picture.text(6, 107, "int8", "small left")
    for place, (value, integer) in enumerate(zip(values, integers, strict=True)):
        picture.box(80 + 76 * place, 22, 72, 30, value, "r0")
        picture.arrow(116 + 76 * place, 54, 116 + 76 * place, 86)
        picture.box(107 + 76 * place, 88, 18, 30, "", "r2")
        picture.text(116 + 76 * place, 134, integer, "small")
    picture.box(560, 88, 72, 30, "scale 0.01", "r1")
    picture.text(596, 134, "once in 256 numbers", "small")
    picture.save()


def streaming() -> None:
    picture = Picture("streaming", "While one block computes, the next is read", 700, 150)
    picture.text(6, 42, "disk", "small left")
    picture.text(6, 92, "compute", "small left")
    for block in range(6):
        picture.box(80 + 85 * block, 22, 80, 30, f"read {block}", f"r{block % 2}")
        picture.box(165 + 85 * block, 72, 80, 30, f"use {block}", f"r{block % 2}")
        picture.arrow(160 + 85 * block, 54, 166 + 85 * block, 70)
    picture.text(
        350,
        134,
        "two blocks are in memory at any time: the one in use, and the one that is being read",
        "small",
    )
    picture.save()


def main() -> None:
    parameter_server()
    ring_all_reduce()
    overlap("ddp_hooks", "Each gradient's all-reduce starts in backward", [[6], [5], [4], [3], [2], [1]])
    overlap("ddp_buckets", "Gradients travel in buckets", [[6, 5, 4], [3, 2], [1]])
    rotating_server()
    for stage in (1, 2, 3):
        zero(stage)
    tensor_parallel()
    pipeline()
    ring_attention()
    expert_parallel()
    gradient_checkpointing()
    loss_scaling()
    int8_gradients()
    streaming()


if __name__ == "__main__":
    main()
