"""Plots of the table ``stats``, for people: each is a PNG, in a light and a dark version.

One row of axes for each queue, the busiest first and :data:`MAX_QUEUES` of them at most: lines of several queues in one
pair of axes can't be told apart where each has several percentiles. Times are UTC. A gap in a line is a window in which
nothing was measured; a dot is a value between two gaps.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.dates import AutoDateLocator, DateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from pipeline.spans import show_ms

#: Queues that have axes of their own; a page with more is not looked at.
MAX_QUEUES = 8
#: Characters of a queue's name in a plot.
MAX_NAME = 32
DPI = 110
WIDTH_INCHES, ROW_INCHES = 10.0, 2.1
#: Inches for the title and (a part of it) the legend above, and for the times below.
HEAD_INCHES, LEGEND_INCHES, FOOT_INCHES = 1.05, 0.35, 0.55

#: Colours that can be told apart by people who do not see all of them (Okabe and Ito), for light and for dark ground.
_LIGHT = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#8C6D00", "#4B4B4B", "#56B4E9", "#6A3D9A")
_DARK = ("#56B4E9", "#F0883E", "#2EC4A0", "#E39AC6", "#F0E442", "#C9C9C9", "#3F8FD9", "#B79BE8")


@dataclass(frozen=True)
class Theme:
    """Colours of a version."""

    name: str
    ground: str
    text: str
    grid: str
    lines: Sequence[str]


LIGHT = Theme("light", "#ffffff", "#1f2328", "#d8dee4", _LIGHT)
DARK = Theme("dark", "#161b22", "#e6edf3", "#30363d", _DARK)


@dataclass(frozen=True)
class Plot:
    """A plot of this name; ``text`` says what is seen, for a page and for those who can't see it."""

    name: str
    title: str
    text: str
    draw: Callable[[Figure, pd.DataFrame, Theme], None]


def draw(plot: Plot, rows: pd.DataFrame, theme: Theme = LIGHT) -> bytes:
    """Return the PNG of a plot of rows of the table ``stats``."""
    settings = {
        "text.color": theme.text, "axes.labelcolor": theme.text, "xtick.color": theme.text, "ytick.color": theme.text,
        "axes.edgecolor": theme.grid, "axes.facecolor": theme.ground, "grid.color": theme.grid, "font.size": 9,
        "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
        # A queue may be called "$x$", which is no formula.
        "text.parse_math": False,
    }  # fmt: skip
    with mpl.rc_context(settings):
        figure = Figure(facecolor=theme.ground, dpi=DPI)
        FigureCanvasAgg(figure)
        plot.draw(figure, rows, theme)
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
    return rows[(rows["scope"] == "window") & (rows["queue"] == queue)].sort_values("starts_at")


def _axes(figure: Figure, rows: int, columns: int, *, legend: bool = True) -> np.ndarray:
    head = HEAD_INCHES - (0 if legend else LEGEND_INCHES)
    height = head + FOOT_INCHES + rows * ROW_INCHES
    figure.set_size_inches(WIDTH_INCHES, height)
    axes = figure.subplots(rows, columns, squeeze=False, sharex="all")
    figure.subplots_adjust(0.085, FOOT_INCHES / height, 0.985, 1 - head / height, hspace=0.42, wspace=0.22)
    return axes


def _legend(figure: Figure, *axes: Axes) -> None:
    found = [each.get_legend_handles_labels() for each in axes]
    handles, labels = ([item for pair in found for item in pair[part]] for part in (0, 1))
    top = 1 - 0.38 / figure.get_figheight()
    figure.legend(handles, labels, loc="upper left", bbox_to_anchor=(0.005, top), ncols=min(len(labels), 8), fontsize=9)


def _name(queue: str) -> str:
    """Return a queue's name for a title: short, and only characters that every font has a picture for."""
    printable = "".join(each if each.isprintable() else "?" for each in queue)
    return printable if len(printable) <= MAX_NAME else printable[: MAX_NAME - 1] + "…"


def _line(axes: Axes, times: pd.Series, values: pd.Series, **style: object) -> None:
    """Draw a line with gaps, and a dot where a value stands alone."""
    numbers = pd.to_numeric(values, errors="coerce").to_numpy(dtype=float, na_value=np.nan)
    there = ~np.isnan(numbers)
    beside = np.concatenate([[False], there[:-1]]) | np.concatenate([there[1:], [False]])
    moments = times.to_numpy()
    (line,) = axes.plot(moments, numbers, **{"linewidth": 1.4, **style})
    alone = there & ~beside
    if alone.any():
        axes.plot(moments[alone], numbers[alone], "o", markersize=3, color=line.get_color())


def _times(axes: np.ndarray, rows: pd.DataFrame) -> None:
    """Label the times: as much of them as differs, the rest is said once."""
    begin, end = rows["starts_at"].min(), rows["ends_at"].max()
    seconds = (end - begin).total_seconds()
    form = next((form for limit, form in _TIME_FORMS if seconds <= limit), "%Y-%m-%d")
    first, last = (moment.strftime("%Y-%m-%d") for moment in (begin, end))
    said = {"%Y-%m-%d": "", "%m-%d %H:%M": f", {first[:4]}"}.get(form, f", {first}")
    if first != last and form.startswith("%H"):
        said += f" to {last}"
    for each in axes.flat:
        each.xaxis.set_major_locator(AutoDateLocator(minticks=3, maxticks=7 if axes.shape[1] > 1 else 10))
        each.xaxis.set_major_formatter(DateFormatter(form))
        each.grid(visible=True, linewidth=0.6)
        each.set_axisbelow(True)
    for lowest in axes[-1]:
        lowest.set_xlabel(f"time (UTC{said})")


#: Up to how many seconds which part of a time is enough.
_TIME_FORMS = ((20 * 60, "%H:%M:%S"), (36 * 3600, "%H:%M"), (4 * 24 * 3600, "%m-%d %H:%M"))


def _durations(axes: Axes) -> None:
    """Make the vertical axis one of durations: logarithmic, since they differ by factors."""
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.get_lines()] or [np.array([])])
    values = values[~np.isnan(values)]
    if not len(values):
        axes.set_yticks([])
        axes.text(0.5, 0.5, "none measured", transform=axes.transAxes, ha="center", va="center", alpha=0.6)
        return
    axes.set_yscale("symlog", linthresh=1)
    least, most = max(values.min(), 0), max(values.max(), 1)
    decades = np.log10(most / max(least, 1)) if most > 0 else 0
    if decades >= 1:
        axes.set_ylim(0 if least < 1 else least / 1.5, most * 1.6)
        ticks = [tick for tick in _DURATION_TICKS if max(least, 1) / 1.5 <= tick <= most * 1.6]
        axes.set_yticks(_thinned(ticks, 5))
    else:
        axes.set_yscale("linear")
        axes.set_ylim(0, most * 1.15)
        axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: "0" if value == 0 else show_ms(value)))
    axes.yaxis.set_minor_locator(NullLocator())


_DURATION_TICKS = (
    1, 3, 10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 60_000, 180_000, 600_000, 1_800_000, 3_600_000, 10_800_000,
    43_200_000, 86_400_000, 259_200_000, 864_000_000, 2_592_000_000,
)  # fmt: skip


def _thinned(ticks: Sequence[float], most: int) -> Sequence[float]:
    step = -(-len(ticks) // most)
    return ticks[::step] if ticks else ticks


def _counts(axes: Axes) -> None:
    axes.set_ylim(bottom=0)
    if not axes.dataLim.y1 > 0:
        axes.set_ylim(0, 1)
        axes.set_yticks([0])
        return
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=False))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))


def _short(value: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.4g}{unit}"
    return f"{value:.3g}"


def _counted(count: int) -> str:
    return f"{count:,}" if count < 100_000 else _short(count)


def _middle(rows: pd.DataFrame) -> pd.Series:
    return rows["starts_at"] + (rows["ends_at"] - rows["starts_at"]) / 2


def _rates(figure: Figure, rows: pd.DataFrame, theme: Theme) -> None:
    """Draw what nearly every message does at the left, and what few do, on a scale of its own, at the right."""
    queues = shown_queues(rows)
    axes = _axes(figure, len(queues), 2)
    for queue, (left, right) in zip(queues, axes, strict=True):
        found = _windows(rows, queue)
        times = _middle(found).to_numpy()
        # Equal rates lie on top of each other: an area, a line and dashes are all seen.
        left.fill_between(times, found["sent_per_second"], color=theme.lines[0], alpha=0.3, linewidth=0, label="sent")
        left.plot(times, found["delivered_per_second"], color=theme.lines[1], linewidth=1.8, label="delivered")
        left.plot(
            times, found["acked_per_second"], color=theme.text, linewidth=1.2, linestyle=(0, (3, 3)), label="acked"
        )
        for at, kind in enumerate(("released", "rejected", "expired", "dead")):
            style = {"color": theme.lines[at + 2], "linestyle": ("-", "--", "-", ":")[at]}
            right.plot(times, found[f"{kind}_per_second"], linewidth=1.4, label=kind, **style)
        left.set_title(_name(queue), loc="left")
        left.set_ylabel("messages/s")
        right.set_title(f"{_name(queue)}: what went wrong", loc="left")
        for each in (left, right):
            _counts(each)
    _times(axes, rows)
    _legend(figure, *axes[0])


def _percentiles(*parts: tuple[str, str], shares: Sequence[str]) -> Callable[[Figure, pd.DataFrame, Theme], None]:
    """Return what draws a column of axes for each part that was measured: (prefix of the table's columns, title)."""

    def draw_percentiles(figure: Figure, rows: pd.DataFrame, theme: Theme) -> None:
        queues = shown_queues(rows)
        shown = rows[rows["queue"].isin(queues)]
        measured = [part for part in parts if shown[f"{part[0]}_max_ms"].notna().any()] or list(parts)
        axes = _axes(figure, len(queues), len(measured))
        for queue, line_of_axes in zip(queues, axes, strict=True):
            found = _windows(rows, queue)
            for (prefix, title), each in zip(measured, line_of_axes, strict=True):
                for share in shares:
                    style = _SHARE_STYLES[share]
                    color = theme.text if share == "max" else theme.lines[_SHARE_COLORS[share]]
                    _line(each, _middle(found), found[f"{prefix}_{share}_ms"], color=color, label=share, **style)
                each.set_title(f"{_name(queue)}: {title}", loc="left")
                _durations(each)
            line_of_axes[0].set_ylabel("duration")
        _times(axes, rows)
        _legend(figure, axes[0][0])

    return draw_percentiles


#: Equal percentiles lie on top of each other: what is drawn later is thinner, so that all are seen.
_SHARE_STYLES: Mapping[str, Mapping[str, object]] = {
    "p50": {"linewidth": 2.8},
    "p95": {"linewidth": 1.9},
    "p99": {"linewidth": 1.1},
    "max": {"linewidth": 0.9, "linestyle": (0, (2, 2))},
}
_SHARE_COLORS = {"p50": 0, "p95": 1, "p99": 2}


def _standing(figure: Figure, rows: pd.DataFrame, theme: Theme) -> None:
    queues = shown_queues(rows)
    windows = {queue: _windows(rows, queue) for queue in queues}
    waits = any(found["delayed"].any() for found in windows.values())
    panels = [("open", "open at the end of a window", "messages", _counts)]
    panels += [("delayed", "delayed, at the end of a window", "messages", _counts)] if waits else []
    panels += [("oldest_open_ms", "age of the oldest open message", "age", _durations)]
    axes = _axes(figure, len(panels), 1)
    for (column, title, unit, scale), (each,) in zip(panels, axes, strict=True):
        for at, (queue, found) in enumerate(windows.items()):
            _line(each, found["ends_at"], found[column], color=theme.lines[at], label=_name(queue))
        each.set_title(title, loc="left")
        each.set_ylabel(unit)
        scale(each)
    _times(axes, rows)
    _legend(figure, axes[0][0])


def _attempts(figure: Figure, rows: pd.DataFrame, theme: Theme) -> None:
    queues = shown_queues(rows)
    columns = min(2, len(queues))
    axes = _axes(figure, -(-len(queues) // columns), columns, legend=False)
    totals = rows[rows["scope"] == "total"].set_index("queue")
    found = {queue: _mapping(totals.loc[queue, "attempts"]) for queue in queues}
    most = max([1, *(attempt for counts in found.values() for attempt in counts)])
    for queue, each in zip(queues, axes.flat, strict=False):
        _bars(each, found[queue], most, theme)
        each.set_title(f"{_name(queue)}: {_counted(sum(found[queue].values()))} ended", loc="left")
    for each in axes.flat[len(queues) :]:
        each.set_visible(False)
    for lowest in axes.flat[max(0, len(queues) - columns) : len(queues)]:
        lowest.set_xlabel("attempts until it ended")
        lowest.tick_params(labelbottom=True)
    for first in axes[:, 0]:
        first.set_ylabel("of its messages")


def _bars(axes: Axes, counts: Mapping[int, int], most: int, theme: Theme) -> None:
    ended = sum(counts.values())
    bars = axes.bar(list(counts), [count / ended for count in counts.values()], color=theme.lines[0], width=0.7)
    if most <= 10:
        axes.bar_label(bars, [_counted(count) for count in counts.values()], fontsize=8, padding=2)
    axes.set_ylim(0, 1.18)
    axes.set_yticks([0, 0.5, 1], ["0 %", "50 %", "100 %"])
    axes.set_xlim(0.4, max(most, 3) + 0.6)
    axes.xaxis.set_major_locator(FixedLocator(range(1, max(most, 3) + 1)))
    axes.grid(visible=True, axis="y", linewidth=0.6)
    axes.set_axisbelow(True)


def _mapping(found: object) -> Mapping[int, int]:
    """Return a map of the table, which pyarrow gives as pairs."""
    pairs = found.items() if isinstance(found, Mapping) else (found if found is not None else ())
    return dict(sorted((int(attempt), int(count)) for attempt, count in pairs))


PLOTS = (
    Plot("rates", "Rates: messages per second", "How many messages were sent, delivered, acked … a second.", _rates),
    Plot(
        "times",
        "Wait and run times",
        "How long messages waited until somebody acquired them, and how long from then until they were settled.",
        _percentiles(("wait", "wait"), ("run", "run"), shares=("p50", "p95", "p99", "max")),
    ),
    Plot(
        "open",
        "Open and delayed messages",
        "How many had not ended, how many were not out yet, and the age of the oldest.",
        _standing,
    ),
    Plot("attempts", "Attempts", "Of the messages that ended: at which attempt. The number is how many.", _attempts),
    Plot(
        "lateness",
        "Lateness",
        "How long after the lease's end or the delay's time the tracker sent the copy.",
        _percentiles(
            ("late_redelivery", "redeliveries"), ("late_delivery", "delayed ones"), shares=("p50", "p99", "max")
        ),
    ),
)
