"""What the Shakespeare example shows: a progress bar or plain lines while it trains, a PNG at the end."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn


def duration(seconds: float) -> str:
    """Minutes and seconds, 1:05."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Screen:
    """Progress on a terminal as a live bar, elsewhere as a line now and then; silent unless `enabled`.

    Args:
        num_steps: Steps of the whole run.
        enabled: Whether this worker prints.
    """

    SECONDS_BETWEEN_LINES = 5.0

    def __init__(self, num_steps: int, *, enabled: bool):
        self.num_steps = num_steps
        self.enabled = enabled
        self.console = Console(highlight=False)
        self.progress: Progress | None = None
        self.started = self.last_line = time.perf_counter()
        self.num_before = 0  # steps of a run that is resumed

    def say(self, text: str) -> None:
        """Print `text` as it is."""
        if self.enabled:
            self.console.print(text, markup=False, soft_wrap=True)

    def __enter__(self) -> Screen:
        self.started = self.last_line = time.perf_counter()
        if self.enabled and sys.stdout.isatty():
            self.progress = Progress(
                MofNCompleteColumn(), BarColumn(bar_width=None), TextColumn("{task.fields[numbers]}"),
                console=self.console, expand=True,
            )  # fmt: skip
            self.progress.start()
            self.progress.add_task("", total=self.num_steps, numbers="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.progress is not None:
            self.progress.stop()

    def update(self, step: int, loss: float, tokens_per_s: float, lr: float, distance: float) -> None:
        """Show where the run stands.

        Args:
            step: Steps done.
            loss: Training loss over the last steps, mean of the workers, nats per character.
            tokens_per_s: Characters a second, all workers together.
            lr: Learning rate.
            distance: Consensus distance.
        """
        if not self.enabled:
            return
        now = time.perf_counter()
        left = duration((now - self.started) / max(1, step - self.num_before) * (self.num_steps - step))
        if self.progress is not None:
            numbers = f"loss {loss:.2f} {tokens_per_s / 1e3:.1f}k tok/s lr {lr:.1e} dist {distance:.2f} {left}"
            self.progress.update(self.progress.task_ids[0], completed=step, numbers=numbers)
        elif now - self.last_line >= self.SECONDS_BETWEEN_LINES or step == self.num_steps:
            self.last_line = now
            self.say(
                f"step {step}/{self.num_steps}  loss {loss:.3f}  {tokens_per_s:,.0f} tokens/s  lr {lr:.2e}  "
                f"consensus distance {distance:.3f}  {left} left"
            )


@dataclass(slots=True)
class Curves:
    """The numbers behind the chart.

    Attributes:
        title: Printed above the chart.
        train: (step, mean training loss of the workers since the entry before), nats per character.
        distance: (step, consensus distance).
        validation: (step, mean validation loss of the replicas), nats per character.
        consensus: Validation loss of the consensus model at the end.
    """

    title: str
    train: list[tuple[int, float]] = field(default_factory=list)
    distance: list[tuple[int, float]] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    consensus: float | None = None

    def add(self, step: int, loss: float, distance: float) -> None:
        """Record one report."""
        self.train.append((step, loss))
        self.distance.append((step, distance))

    def add_validation(self, step: int, loss: float) -> None:
        """Record one evaluation."""
        self.validation.append((step, loss))

    def state_dict(self) -> dict[str, list[tuple[int, float]]]:
        """What a checkpoint keeps of it."""
        return {"train": self.train, "distance": self.distance, "validation": self.validation}

    def load_state_dict(self, state: dict[str, list[tuple[int, float]]]) -> None:
        """Go on with the numbers of a run that was saved."""
        self.train, self.distance, self.validation = state["train"], state["distance"], state["validation"]


def draw(curves: Curves, path: Path) -> None:
    """Loss above, consensus distance below, over the same steps, as a PNG at `path`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (loss, distance) = plt.subplots(
        2, 1, figsize=(8, 6.5), sharex=True, height_ratios=[3, 2], layout="constrained"
    )
    loss.set_title(curves.title)
    loss.plot(*zip(*curves.train, strict=True), color="#8ab6d6", label="training, mean of workers")
    loss.plot(*zip(*curves.validation, strict=True), "o-", color="#1f4e79", label="validation, mean of replicas")
    if curves.consensus is not None:
        label = f"validation, consensus model: {curves.consensus:.3f}"
        loss.plot(curves.train[-1][0], curves.consensus, "D", color="#d1495b", label=label)
    loss.set_ylabel("loss, nats per character")
    loss.legend(frameon=False)
    distance.plot(*zip(*curves.distance, strict=True), color="#d1495b")
    distance.set_ylabel("consensus distance")
    distance.set_xlabel("step")
    distance.set_ylim(bottom=0)
    for axes in (loss, distance):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
