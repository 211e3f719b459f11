"""Plots of the table ``stats``: each is a PNG.

Each queue has its own row of axes, because several queues with several percentiles each are unreadable in one. Only the
:data:`MAX_QUEUES` busiest queues are plotted. Times are UTC. A gap in a line is a window without measurements; a dot is
a value between two gaps.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from matplotlib.typing import RcKeyType

from pipeline.spans import show_ms

MAX_QUEUES = 8
#: Characters of a queue name in a plot.
MAX_NAME = 32
DPI = 110
WIDTH_INCHES, ROW_INCHES = 10.0, 2.1
#: Inches above the axes for the title and the legend, and below them for the times.
HEAD_INCHES, LEGEND_INCHES, FOOT_INCHES = 1.05, 0.35, 0.55


GROUND, TEXT, GRID = "#ffffff", "#1f2328", "#d8dee4"
#: Colours of lines; they suit colour-blind readers (Okabe and Ito).
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#8C6D00", "#4B4B4B", "#56B4E9", "#6A3D9A")

Draw = Callable[[Figure, pd.DataFrame], None]


@dataclass(frozen=True)
class Plot:
    """One plot; ``text`` describes it on the page and for screen readers."""

    name: str
    title: str
    text: str
    draw: Draw


def draw(plot: Plot, rows: pd.DataFrame) -> bytes:
    settings: dict[RcKeyType, Any] = {
        "text.color": TEXT, "axes.labelcolor": TEXT, "xtick.color": TEXT, "ytick.color": TEXT,
        "axes.edgecolor": GRID, "axes.facecolor": GROUND, "grid.color": GRID, "font.size": 9,
        "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
        # A queue may be called "$x$", which is not a formula.
        "text.parse_math": False,
    }  # fmt: skip
    with mpl.rc_context(settings):
        figure = Figure(facecolor=GROUND, dpi=DPI)
        FigureCanvasAgg(figure)
        plot.draw(figure, rows)
        figure.suptitle(plot.title, x=0.01, ha="left", y=1 - 0.12 / figure.get_figheight(), va="top", fontweight="bold")
        picture = io.BytesIO()
        figure.savefig(picture, format="png", metadata={"Software": None})
    return picture.getvalue()


def shown_queues(rows: pd.DataFrame) -> list[str]:
    """Return the queues that are plotted, the busiest first."""
    totals = rows[rows["scope"] == "total"].copy()
    totals["busy"] = totals["sent"] + totals["delivered"]
    return list(totals.sort_values(["busy", "queue"], ascending=[False, True])["queue"][:MAX_QUEUES])


def _windows(rows: pd.DataFrame, queue: str) -> pd.DataFrame:
    windows = rows[(rows["scope"] == "window") & (rows["queue"] == queue)].sort_values("starts_at")
    return windows.assign(middle=windows["starts_at"] + (windows["ends_at"] - windows["starts_at"]) / 2)


def _axes(figure: Figure, rows: int, columns: int, *, legend: bool = True) -> np.ndarray:
    head = HEAD_INCHES - (0 if legend else LEGEND_INCHES)
    height = head + FOOT_INCHES + rows * ROW_INCHES
    figure.set_size_inches(WIDTH_INCHES, height)
    axes = figure.subplots(rows, columns, squeeze=False, sharex="all")
    figure.subplots_adjust(0.085, FOOT_INCHES / height, 0.985, 1 - head / height, hspace=0.42, wspace=0.22)
    return axes


def _legend(figure: Figure, *axes: Axes) -> None:
    labelled = [panel.get_legend_handles_labels() for panel in axes]
    handles = [handle for handles, _ in labelled for handle in handles]
    labels = [label for _, labels in labelled for label in labels]
    top = 1 - 0.38 / figure.get_figheight()
    figure.legend(handles, labels, loc="upper left", bbox_to_anchor=(0.005, top), ncols=min(len(labels), 8), fontsize=9)


def _name(queue: str) -> str:
    """Return a queue name for a title: short, without characters that fonts lack."""
    printable = "".join(character if character.isprintable() else "?" for character in queue)
    return printable if len(printable) <= MAX_NAME else printable[: MAX_NAME - 1] + "…"


def _line(axes: Axes, times: pd.Series, values: pd.Series, **style: Any) -> None:
    """Draw a line with gaps, and a dot for a value between two gaps."""
    numbers = pd.to_numeric(values, errors="coerce").to_numpy(dtype=float, na_value=np.nan)
    padded = np.concatenate([[np.nan], numbers, [np.nan]])
    alone = ~np.isnan(numbers) & np.isnan(padded[:-2]) & np.isnan(padded[2:])
    (line,) = axes.plot(times.to_numpy(), numbers, **{"linewidth": 1.4, **style})
    if alone.any():
        axes.plot(times.to_numpy()[alone], numbers[alone], "o", markersize=3, color=line.get_color())


def _times(axes: np.ndarray, rows: pd.DataFrame) -> None:
    """Make the horizontal axes those of the windows; without a range, one point is shown with years around it."""
    windows = rows[rows["scope"] == "window"]
    begin, end = windows["starts_at"].min(), windows["ends_at"].max()
    margin = (end - begin) * 0.02
    axes[0, 0].set_xlim(begin - margin, end + margin)
    for panel in axes.flat:
        locator = AutoDateLocator(minticks=3, maxticks=7 if axes.shape[1] > 1 else 10)
        panel.xaxis.set_major_locator(locator)
        panel.xaxis.set_major_formatter(ConciseDateFormatter(locator))
        panel.grid(visible=True, linewidth=0.6)
        panel.set_axisbelow(True)
    for lowest in axes[-1]:
        lowest.set_xlabel("time (UTC)")


def _durations(axes: Axes) -> None:
    """Make the vertical axis one of durations, logarithmic if they differ by factors."""
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.get_lines()])
    values = values[~np.isnan(values)]
    if not len(values):
        axes.set_yticks([])
        axes.text(0.5, 0.5, "none measured", transform=axes.transAxes, ha="center", va="center", alpha=0.6)
        return
    least, most = max(values.min(), 0), max(values.max(), 1)
    if most >= 10 * max(least, 1):
        axes.set_yscale("symlog", linthresh=1)
        axes.set_ylim(0 if least < 1 else least / 1.5, most * 1.6)
        ticks = [tick for tick in _DURATION_TICKS if max(least, 1) / 1.5 <= tick <= most * 1.6]
        axes.set_yticks(ticks[:: -(-len(ticks) // 5)])
    else:
        axes.set_ylim(0, most * 1.15)
        axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: "0" if value == 0 else show_ms(value)))
    axes.yaxis.set_minor_locator(NullLocator())


_DURATION_TICKS = (
    1, 3, 10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 60_000, 180_000, 600_000, 1_800_000, 3_600_000, 10_800_000,
    43_200_000, 86_400_000, 259_200_000, 864_000_000, 2_592_000_000,
)  # fmt: skip


def _counts(axes: Axes) -> None:
    axes.set_ylim(0, None if axes.dataLim.y1 > 0 else 1)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _counted(value)))


def _counted(count: float) -> str:
    return f"{count:,.6g}" if count < 100_000 else EngFormatter(sep="")(count)


_RATES = ("sent", "delivered", "acked", "released", "rejected", "expired", "dead")


def _rates(figure: Figure, rows: pd.DataFrame) -> None:
    """Draw the usual events on the left and failures, which are rarer, on their own scale on the right."""
    queues = shown_queues(rows)
    axes = _axes(figure, len(queues), 2)
    for queue, (left, right) in zip(queues, axes, strict=True):
        windows = _windows(rows, queue)
        # A step for each window, so that one window alone is also visible.
        times = [*windows["starts_at"], windows["ends_at"].iloc[-1]]
        rates = {kind: [*windows[f"{kind}_per_second"], windows[f"{kind}_per_second"].iloc[-1]] for kind in _RATES}
        # Equal rates cover each other: an area, a line and dashes stay visible.
        left.fill_between(times, rates["sent"], step="post", color=LINES[0], alpha=0.3, linewidth=0, label="sent")
        left.step(times, rates["delivered"], where="post", color=LINES[1], linewidth=1.8, label="delivered")
        dashes = {"color": TEXT, "linewidth": 1.2, "linestyle": (0, (3, 3))}
        left.step(times, rates["acked"], where="post", label="acked", **dashes)
        for at, kind in enumerate(_RATES[3:]):
            style = {"color": LINES[at + 2], "linestyle": ("-", "--", "-", ":")[at]}
            right.step(times, rates[kind], where="post", linewidth=1.4, label=kind, **style)
        left.set_title(_name(queue), loc="left")
        left.set_ylabel("messages/s")
        right.set_title(f"{_name(queue)}: failures", loc="left")
        _counts(left)
        _counts(right)
    _times(axes, rows)
    _legend(figure, *axes[0])


def _percentiles(parts: Sequence[tuple[str, str]], shares: Sequence[str]) -> Draw:
    """Return a function that draws a column of axes for each measured part: (prefix of the table's columns, title)."""

    def draw_percentiles(figure: Figure, rows: pd.DataFrame) -> None:
        queues = shown_queues(rows)
        shown = rows[rows["queue"].isin(queues)]
        measured = [part for part in parts if shown[f"{part[0]}_max_ms"].notna().any()] or parts
        axes = _axes(figure, len(queues), len(measured))
        for queue, line_of_axes in zip(queues, axes, strict=True):
            windows = _windows(rows, queue)
            for (prefix, title), panel in zip(measured, line_of_axes, strict=True):
                for share in shares:
                    color, style = _SHARE_STYLES[share]
                    style = {"color": TEXT if color is None else LINES[color], **style}
                    _line(panel, windows["middle"], windows[f"{prefix}_{share}_ms"], label=share, **style)
                panel.set_title(f"{_name(queue)}: {title}", loc="left")
                _durations(panel)
            line_of_axes[0].set_ylabel("duration")
        _times(axes, rows)
        _legend(figure, axes[0][0])

    return draw_percentiles


#: Colour and line; equal percentiles cover each other, so later ones are thinner.
_SHARE_STYLES: Mapping[str, tuple[int | None, Mapping[str, object]]] = {
    "p50": (0, {"linewidth": 2.8}),
    "p95": (1, {"linewidth": 1.9}),
    "p99": (2, {"linewidth": 1.1}),
    "max": (None, {"linewidth": 0.9, "linestyle": (0, (2, 2))}),
}


def _standing(figure: Figure, rows: pd.DataFrame) -> None:
    windows = {queue: _windows(rows, queue) for queue in shown_queues(rows)}
    panels = [("open", "open at the end of a window", "messages", _counts)]
    if any(of_queue["delayed"].any() for of_queue in windows.values()):
        panels.append(("delayed", "delayed, at the end of a window", "messages", _counts))
    panels.append(("oldest_open_ms", "age of the oldest open message", "age", _durations))
    axes = _axes(figure, len(panels), 1)
    for (column, title, unit, scale), (panel,) in zip(panels, axes, strict=True):
        for at, (queue, of_queue) in enumerate(windows.items()):
            _line(panel, of_queue["ends_at"], of_queue[column], color=LINES[at], label=_name(queue))
        panel.set_title(title, loc="left")
        panel.set_ylabel(unit)
        scale(panel)
    _times(axes, rows)
    _legend(figure, axes[0][0])


def _attempts(figure: Figure, rows: pd.DataFrame) -> None:
    queues = shown_queues(rows)
    columns = min(2, len(queues))
    axes = _axes(figure, -(-len(queues) // columns), columns, legend=False)
    totals = rows[rows["scope"] == "total"].set_index("queue")
    counts = {queue: _mapping(totals.loc[queue, "attempts"]) for queue in queues}
    most = max([1, *(attempt for of_queue in counts.values() for attempt in of_queue)])
    for queue, panel in zip(queues, axes.flat, strict=False):
        _bars(panel, counts[queue], most)
        panel.set_title(f"{_name(queue)}: {_counted(sum(counts[queue].values()))} ended", loc="left")
    for panel in axes.flat[len(queues) :]:
        panel.set_visible(False)
    for lowest in axes.flat[max(0, len(queues) - columns) : len(queues)]:
        lowest.set_xlabel("attempts until it ended")
        lowest.tick_params(labelbottom=True)
    for first in axes[:, 0]:
        first.set_ylabel("of its messages")


def _bars(axes: Axes, counts: Mapping[int, int], most: int) -> None:
    ended = sum(counts.values())
    bars = axes.bar(list(counts), [count / ended for count in counts.values()], color=LINES[0], width=0.7)
    if most <= 10:
        axes.bar_label(bars, [_counted(count) for count in counts.values()], fontsize=8, padding=2)
    axes.set_ylim(0, 1.18)
    axes.set_yticks([0, 0.5, 1], ["0%", "50%", "100%"])
    axes.set_xlim(0.4, max(most, 3) + 0.6)
    axes.xaxis.set_major_locator(FixedLocator(range(1, max(most, 3) + 1)))
    axes.grid(visible=True, axis="y", linewidth=0.6)
    axes.set_axisbelow(True)


def _mapping(cell: Mapping[int, int] | Sequence[tuple[int, int]] | None) -> Mapping[int, int]:
    """Return a map of the table, which pyarrow may return as pairs."""
    return {int(attempt): int(count) for attempt, count in sorted(dict(cell if cell is not None else {}).items())}


PLOTS = (
    Plot("rates", "Rates: messages per second", "Messages sent, delivered, acked, and failures, per second.", _rates),
    Plot(
        "times",
        "Wait and run times",
        "How long messages waited until a consumer acquired them, and from then until they were settled.",
        _percentiles((("wait", "wait"), ("run", "run")), ("p50", "p95", "p99", "max")),
    ),
    Plot(
        "open",
        "Open and delayed messages",
        "Messages that had not ended, messages still delayed, and the age of the oldest.",
        _standing,
    ),
    Plot("attempts", "Attempts", "Messages that ended, by their last attempt; each number is a count.", _attempts),
    Plot(
        "lateness",
        "Lateness",
        "How long after the lease or delay had expired the tracker sent the message.",
        _percentiles(
            (("late_redelivery", "redeliveries"), ("late_delivery", "delayed messages")), ("p50", "p99", "max")
        ),
    ),
)
