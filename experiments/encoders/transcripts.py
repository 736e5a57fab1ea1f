"""Word error rates of Whisper's transcripts with and without a plan in its encoder.

    python -m experiments.encoders.transcripts --whisper FOLDER --clips FOLDER --out DIR [--speak 40]

A clip is NAME.wav (16 kHz, mono, 16 bits, at most 30 seconds) beside NAME.txt, the words that are spoken. `--speak N`
first adds N clips to the folder, in which `espeak-ng` reads pieces of the demo's text by several voices. The plan runs
in the encoder; the decoder is exact, greedy, and repeats no five tokens.

The word error rate is the number of words inserted, deleted or replaced, over the number of words spoken, all clips
together. The interval of its difference to exact attention is a bootstrap over clips, 95 %.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fewkeys as fk
from fewkeys.bench.machine import machine, versions
from fewkeys.core.files import write_json, write_whole
from fewkeys.demo import TEXT
from fewkeys.integrations.loading import quiet

FILE = "transcripts.json"
VOICES = ("en-us", "en-gb", "en-gb-scotland", "en-us+f3", "en-gb+f4", "en-gb+m7")
WORDS = 45
"""Of a spoken piece: about 20 seconds."""
START, END, MOST_TOKENS = (50258, 50259, 50359, 50363), 50257, 160
"""Whisper's tokens for "transcribe English without times", its end of text, and a bound of a transcript's length."""
REPEATED = 5
"""No transcript repeats so many tokens in a row: greedy Whisper else falls into loops, whatever its attention."""
RESAMPLES = 10_000
PLANS = {
    "budget(64)": fk.budget(64),
    "budget(128)": fk.budget(128),
    "budget(192)": fk.budget(192),
    "sinks + window 192": fk.Plan(fk.Sinks(4) | fk.Window(187)),
    "key norm 192": fk.Plan(fk.select.KeyNorm(192)),
    "random keys 192": fk.Plan(fk.RandomKeys(192)),
    "oracle 192": fk.Plan(fk.TopK(192)),
}


def main() -> None:
    """Transcribe all clips by every row, and write the table and the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--whisper", type=Path, required=True, help="folder of WhisperForConditionalGeneration")
    parser.add_argument("--clips", type=Path, required=True, help="folder of NAME.wav and NAME.txt")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--speak", type=int, default=0, help="add so many clips spoken by espeak-ng")
    options = parser.parse_args()
    if options.speak:
        speak(options.clips, options.speak)
    clips = sorted(options.clips.glob("*.wav"))
    if not clips:
        parser.error(f"--clips: expected NAME.wav files, got none in {options.clips}")
    spoken = [words(path.with_suffix(".txt").read_text()) for path in clips]
    whisper = Whisper(options.whisper)
    features = whisper.features([_sound(path) for path in clips])
    rows: dict[str, dict[str, Any]] = {}
    for name, plan in ({"exact": None} | PLANS).items():
        texts = whisper.transcribe(features, plan)
        errors = [distance(words(text), expected) for text, expected in zip(texts, spoken, strict=True)]
        rows[name] = {"errors": errors, "transcripts": texts}
        print(f"{name}: {sum(errors)} of {sum(map(len, spoken))} words", flush=True)
    results = {
        "clips": [path.stem for path in clips],
        "words": [len(expected) for expected in spoken],
        "rows": rows,
        "machine": machine(),
        "versions": versions(),
    }
    write_json(options.out, FILE, results)
    write_whole(options.out / "transcripts.md", table(results))
    print(table(results))


def speak(folder: Path, count: int) -> None:
    """Write `count` clips of consecutive pieces of the demo's text, by the voices in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    text = TEXT.read_text().split()
    for i in range(count):
        piece = " ".join(text[i * WORDS : (i + 1) * WORDS])
        path = folder / f"espeak-{i:03}.wav"
        command = ["espeak-ng", "-v", VOICES[i % len(VOICES)], "-s", "150", "--stdout", piece]
        spoken = subprocess.run(command, capture_output=True, check=True).stdout
        to_16_khz = ["sox", "-t", "wav", "-", "-r", "16000", "-c", "1", "-b", "16", str(path)]
        subprocess.run(to_16_khz, input=spoken, check=True)
        path.with_suffix(".txt").write_text(piece)


class Whisper:
    """Whisper with a plan in its encoder."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer, WhisperFeatureExtractor, WhisperForConditionalGeneration

        with quiet():
            self.model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
            self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.extractor = WhisperFeatureExtractor(feature_size=self.model.config.num_mel_bins)

    def features(self, sounds: Sequence[Tensor]) -> Tensor:
        """(clips, bins, frames): every clip filled up to 30 seconds with silence."""
        arrays = [sound.numpy() for sound in sounds]
        features: Tensor = self.extractor(arrays, sampling_rate=16000, return_tensors="pt").input_features
        return features

    @torch.no_grad()
    def transcribe(self, features: Tensor, plan: fk.Plan | None) -> list[str]:
        """The greedy transcripts; None: exact attention."""
        encoder = self.model.get_encoder()
        if plan is None:
            states = torch.cat([encoder(clip).last_hidden_state for clip in features.split(1)])
        else:
            with fk.apply(encoder, plan.never_exact()):
                states = torch.cat([encoder(clip).last_hidden_state for clip in features.split(1)])
        tokens, past = torch.tensor([START]).expand(len(states), -1), None
        ended = torch.zeros(len(states), dtype=torch.bool)
        last = tokens
        while not ended.all() and tokens.shape[1] < MOST_TOKENS:
            step = self.model(encoder_outputs=(states,), decoder_input_ids=last, past_key_values=past, use_cache=True)
            past = step.past_key_values
            logits = step.logits[:, -1]
            for row, before in zip(logits, tokens.tolist(), strict=True):
                row[_repeated(before)] = -torch.inf
            last = logits.argmax(-1).masked_fill(ended, END).unsqueeze(1)
            ended |= last.squeeze(1) == END
            tokens = torch.cat([tokens, last], 1)
        return [self.tokenizer.decode(row[len(START) :], skip_special_tokens=True).strip() for row in tokens]


def _repeated(tokens: Sequence[int]) -> list[int]:
    """The tokens that would repeat `REPEATED` tokens in a row."""
    end = tokens[len(tokens) - REPEATED + 1 :]
    starts = range(len(tokens) - REPEATED + 1)
    return [tokens[i + REPEATED - 1] for i in starts if tokens[i : i + REPEATED - 1] == end]


def words(text: str) -> list[str]:
    """Lower-case words without punctuation."""
    return re.findall(r"[a-z0-9']+", text.lower().replace("-", " "))


def distance(heard: Sequence[str], spoken: Sequence[str]) -> int:
    """The least number of words to insert, delete or replace (Levenshtein)."""
    row = list(range(len(spoken) + 1))
    for i, one in enumerate(heard, 1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(spoken, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (one != other))
    return row[-1]


def table(results: dict[str, Any]) -> str:
    """Markdown: the word error rate of every row, its difference to exact attention, and how many transcripts agree."""
    spoken, exact = torch.tensor(results["words"], dtype=torch.float64), results["rows"]["exact"]
    draws = torch.randint(len(spoken), (RESAMPLES, len(spoken)), generator=torch.Generator().manual_seed(0))
    lines = [
        f"{len(spoken)} clips, {int(spoken.sum())} words",
        "",
        "| encoder's attention | word error rate, % | minus exact's, points (95 %) | transcripts equal to exact's |",
        "| --- | --- | --- | --- |",
    ]
    before = torch.tensor(exact["errors"], dtype=torch.float64)
    for name, row in results["rows"].items():
        errors = torch.tensor(row["errors"], dtype=torch.float64)
        apart = 100 * (errors - before)[draws].sum(1) / spoken[draws].sum(1)
        low, high = torch.quantile(apart, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        rate, difference = 100 * errors.sum() / spoken.sum(), 100 * (errors - before).sum() / spoken.sum()
        equal = sum(map(str.__eq__, row["transcripts"], exact["transcripts"]))
        interval = "" if name == "exact" else f"{difference:+.2f} ({low:+.2f} to {high:+.2f})"
        lines.append(f"| {name} | {rate:.2f} | {interval} | {equal} / {len(spoken)} |")
    return "\n".join(lines) + "\n"


def _sound(path: Path) -> Tensor:
    with wave.open(str(path)) as file:
        if (file.getframerate(), file.getnchannels(), file.getsampwidth()) != (16000, 1, 2):
            raise ValueError(f"{path}: expected 16 kHz, mono, 16 bits")
        return torch.frombuffer(bytearray(file.readframes(file.getnframes())), dtype=torch.int16).float() / 32768


if __name__ == "__main__":
    main()
