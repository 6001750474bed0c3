"""Draws the pictures of the lessons: python docs/images/from_scratch/draw.py writes them beside this file.

Text outside of boxes follows the reader's light or dark mode.
"""

from __future__ import annotations

from pathlib import Path

STYLE = """
text { font: 13px sans-serif; fill: #222; text-anchor: middle }
.out { fill: #333 } .small { font-size: 11px } .left { text-anchor: start } .title { font-weight: bold }
rect { stroke: #555 } .line { stroke: #666; stroke-width: 1.5; fill: none } .tip { fill: #666 }
.r0 { fill: #8ecae6 } .r1 { fill: #ffd08a } .r2 { fill: #b7e4a7 } .r3 { fill: #f4b6c2 }
.off { fill: #e4e4e4 } .none { fill: none; stroke-dasharray: 3 3 }
@media (prefers-color-scheme: dark) {
  .out { fill: #ddd } rect { stroke: #999 } .line { stroke: #aaa } .tip { fill: #aaa }
}
"""


class Picture:
    """SVG elements, written down in the order in which they are drawn."""

    def __init__(self, name: str, title: str, width: int, height: int) -> None:
        self.name, self.width, self.height = name, width, height
        self.lines = [f"<title>{title}</title>", f"<style>{STYLE}</style>"]
        self.lines.append(
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path class="tip" d="M0 0L8 4L0 8z"/></marker></defs>'
        )

    def box(self, x: float, y: float, w: float, h: float, label: str = "", kind: str = "off") -> None:
        """A rectangle. ``kind`` is a class of STYLE: r0 to r3 are the colours of the processes."""
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


def main() -> None:
    parameter_server()
    ring_all_reduce()
    overlap("ddp_hooks", "Each gradient's all-reduce starts in backward", [[6], [5], [4], [3], [2], [1]])
    overlap("ddp_buckets", "Gradients travel in buckets", [[6, 5, 4], [3, 2], [1]])
    rotating_server()
    for stage in (1, 2, 3):
        zero(stage)


if __name__ == "__main__":
    main()
