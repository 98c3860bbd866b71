"""One plot style for the book and the figures that several chapters share.

Figures are drawn on white, so that they stay legible on the light card that the theme puts under images in dark mode.
Arrays may be NumPy or torch; nothing here draws a random number.
"""

import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
from matplotlib.axes import Axes

PALETTE = "colorblind"
WIDTH = 6.6  # inches; at 110 dots an inch a figure is about as wide as the text column
CORNERS = np.array([[0.0, 0.0], [1.0, 0.0], [0.5, np.sqrt(3) / 2]])  # of the 3-action simplex


def use() -> None:
    """Set the book's plot style; each chapter calls it once."""
    sns.set_theme(style="ticks", context="notebook", palette=PALETTE, font_scale=0.85)
    plt.rcParams.update(
        {
            "figure.figsize": (WIDTH, 3.6),
            "figure.dpi": 110,
            "figure.facecolor": "white",
            "savefig.facecolor": "white",
            "figure.constrained_layout.use": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.alpha": 0.35,
            "lines.linewidth": 1.8,
            "legend.frameon": False,
        }
    )


def band(ax: Axes, x, y, *, label: str, color=None, quantiles: tuple[float, float] = (0.25, 0.75), **line) -> None:
    """Median over the last axis with a band between two quantiles.  x ``[n]``, y ``[n, n_tasks]``."""
    y = np.asarray(y)
    (drawn,) = ax.plot(x, np.median(y, -1), label=label, color=color, **line)
    low, high = np.quantile(y, quantiles, axis=-1)
    ax.fill_between(x, low, high, color=drawn.get_color(), alpha=0.2, linewidth=0)


def bound_against_truth(ax: Axes, truth, bound, *, label: str, smallest: float = 1e-12, **points) -> None:
    """Scatter of a bound (vertical) over what it bounds (horizontal) on logarithmic axes; see `diagonal`.

    Values below `smallest` are drawn at it, so that exact zeros stay in the picture.
    """
    truth, bound = (np.maximum(np.asarray(x, dtype=float).ravel(), smallest) for x in (truth, bound))
    ax.scatter(truth, bound, s=9, alpha=0.6, linewidth=0, label=label, **points)
    ax.set(xscale="log", yscale="log")


def diagonal(ax: Axes, text: str = "bound = truth") -> None:
    """The line on which a bound would be attained; every point has to lie on it or above."""
    low = min(ax.get_xlim()[0], ax.get_ylim()[0])
    high = max(ax.get_xlim()[1], ax.get_ylim()[1])
    ax.plot([low, high], [low, high], color="0.35", linestyle="--", linewidth=1.2, label=text)


def to_plane(p) -> np.ndarray:
    """Points of the 3-action simplex, ``[..., 3]``, in the plane of the ternary picture, ``[..., 2]``."""
    return np.asarray(p) @ CORNERS


def simplex(ax: Axes, labels: tuple[str, str, str] = ("action 0", "action 1", "action 2")) -> None:
    """Draw the empty 3-action simplex: its edges, a light grid and the corners' names."""
    for step in (0.25, 0.5, 0.75):
        for i in range(3):
            ends = np.full((2, 3), 0.0)
            ends[:, i] = step
            ends[0, (i + 1) % 3] = ends[1, (i + 2) % 3] = 1 - step
            ax.plot(*to_plane(ends).T, color="0.9", linewidth=0.8, zorder=0)
    ax.plot(*CORNERS[[0, 1, 2, 0]].T, color="0.4", linewidth=1.2, zorder=1)
    for (x, y), text in zip(CORNERS, labels, strict=True):
        above = y > 0
        ax.text(x, y + (0.03 if above else -0.05), text, ha="center", va="bottom" if above else "top", fontsize="small")
    ax.set(aspect="equal", xlim=(-0.12, 1.12), ylim=(-0.16, 1.0))
    ax.axis("off")


def simplex_path(ax: Axes, p, **line) -> None:
    """A curve through points ``[n, 3]`` of the simplex."""
    ax.plot(*to_plane(p).T, **line)


def grid_policy(ax: Axes, values, probabilities, shape: tuple[int, int], text=None, **heat) -> None:
    """State values of a grid world as a heat map with an arrow for each probable action (left, down, right, up).

    Args:
        ax: the axes.
        values: ``[S]`` in row-major order.
        probabilities: ``[S, 4]``; an arrow's length is its probability, states with text get none.
        shape: rows and columns.
        text: optional labels ``[S]``, empty where the arrows are wanted.
        heat: passed to seaborn's `heatmap`.
    """
    rows, columns = shape
    sns.heatmap(np.asarray(values).reshape(shape), ax=ax, square=True, xticklabels=False, yticklabels=False, **heat)
    moves = np.array([[-1, 0], [0, 1], [1, 0], [0, -1]])  # x to the right, y downwards
    for s in range(rows * columns):
        y, x = divmod(s, columns)
        if text is not None and text[s]:
            ax.text(x + 0.5, y + 0.5, text[s], ha="center", va="center", fontsize="small", color="black")
            continue
        for probability, (dx, dy) in zip(np.asarray(probabilities)[s], moves, strict=True):
            if probability > 0.02:
                reach = 0.42 * probability
                ax.annotate(
                    "",
                    xytext=(x + 0.5, y + 0.5),
                    xy=(x + 0.5 + reach * dx, y + 0.5 + reach * dy),
                    arrowprops={"arrowstyle": "->", "color": "black", "linewidth": 1.1, "shrinkA": 0, "shrinkB": 0},
                )


def token_map(ax: Axes, values, *, rows: dict[str, int], columns: dict[str, int], outline: str | None = None, **image):
    """A matrix over tokens as a picture, with the names and borders of its groups of rows and columns.

    Args:
        ax: the axes.
        values: ``[n_rows, n_columns]``.
        rows, columns: name and size of each group, in order.
        outline: a group of rows to outline.
        image: passed to matplotlib's `imshow`, whose result is returned.
    """
    drawn = ax.imshow(np.asarray(values), **image)
    for groups, axis, line in ((dict(rows), ax.yaxis, ax.axhline), (dict(columns), ax.xaxis, ax.axvline)):
        edges = np.cumsum([0, *groups.values()])
        slanted = 0 if axis is ax.yaxis else 30 if len(groups) <= 6 else 90
        axis.set_ticks((edges[:-1] + edges[1:] - 1) / 2, list(groups), rotation=slanted, fontsize="x-small")
        for edge in edges[1:-1]:
            line(edge - 0.5, color="0.6", linewidth=0.7)
        if axis is ax.yaxis and outline is not None:
            first, width = edges[list(groups).index(outline)], np.shape(values)[1]
            style = {"fill": False, "edgecolor": "C3", "linewidth": 1.8}
            box = plt.Rectangle((-0.45, first - 0.5), width - 0.1, groups[outline], **style)
            ax.add_patch(box)
    ax.grid(False)
    return drawn
