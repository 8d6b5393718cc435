"""The teachers of distillation: their distributions are over the ids that the student has too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sample_batches import batch, packs

from vlmrl.config.actor import Model
from vlmrl.config.data import Columns
from vlmrl.config.ds import Ds
from vlmrl.config.train import Loop
from vlmrl.config.vision import Vision
from vlmrl.data.packing import collect
from vlmrl.errors import ConfigError
from vlmrl.learning.forward import LogprobForward
from vlmrl.learning.inner_teacher import InnerTeacher
from vlmrl.learning.reference import Reference
from vlmrl.learning.settings import InnerTeacherSettings, PolicySettings, ReferenceSettings, TeacherSettings
from vlmrl.learning.teacher import Teacher, vocabulary_of
from vlmrl.models import tiny
from vlmrl.models.attention import implementation
from vlmrl.models.divergence import Direction
from vlmrl.models.inputs import model_inputs
from vlmrl.models.load import load_model
from vlmrl.models.scorer import Scorer
from vlmrl.plugins import Processor, processor, processor_of
from vlmrl.types import Floats, Sample

torch.set_num_threads(1)
VOCABULARY = 384
DIRECTIONS: tuple[Direction, ...] = ("forward", "reverse")


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """`family(rows)`: a model whose output layer has this many rows, the first 384 of which are those of the others."""
    out = tmp_path_factory.mktemp("family")
    base = tiny.build("qwen2_5_vl", out / "base", size="micro")
    net = load_model(str(base), dtype=torch.float32, attn_implementation="sdpa")
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)

    def make(rows: int) -> Path:
        folder = out / str(rows)
        if not folder.exists():
            read(base).save(folder)
            net.resize_token_embeddings(rows, mean_resizing=False)
            if rows > VOCABULARY:
                with torch.no_grad():  # as if training had never pushed them down
                    net.get_output_embeddings().weight[VOCABULARY:] = 1.0
            net.save_pretrained(folder)
        return folder

    for rows in (400, VOCABULARY, 370):  # downwards, for the first rows to be the same
        make(rows)
    return make


def read(path: Path) -> Processor:
    return processor(str(path), min_pixels=3136, max_pixels=100_000)


def settings(student: Path) -> dict[str, Any]:
    model = Model(model_name_or_path=str(student))
    shared = {"ds": Ds(zero_stage=0, param_dtype="fp32"), "columns": Columns(), "vision": Vision()}
    return {"actor": model, "temperature": 0.7, "bans": True} | shared


def teacher(path: Path, student: Path, **options: Any) -> Teacher:
    return TeacherSettings(
        path=str(path),
        flag="algo.distill.teacher_model_name_or_path",
        loop=Loop(),
        **(settings(student) | options),
    ).build()


@pytest.mark.parametrize("rows", [400, VOCABULARY, 370])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_divergence_from_an_inner_teacher_is_that_of_full_logits(
    family: Callable[[int], Path], rows: int, direction: Direction
) -> None:
    where, base = torch.device("cpu"), family(VOCABULARY)
    reader = processor_of(str(base), Columns())
    student = load_model(str(base), dtype=torch.float32, attn_implementation=implementation("auto", where))
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    options = settings(base) | {"temperature": 1.0, "bans": False}
    teacher = InnerTeacher(
        InnerTeacherSettings(path=str(family(rows)), direction=direction, coef=0.5),
        PolicySettings(loop=Loop(), total_steps=1, loss=None, **options),
        processor=reader,
        where=where,
    )
    forward = LogprobForward(Scorer(student), reader, temperature=1.0, bans=False, device=where, cache_bytes=0)
    samples = [sample for sample in batch(reader) if int(sample.tokens.max()) < rows]
    (pack,) = packs(samples)
    output = forward(pack, teacher=teacher.rows(pack))
    assert output.divergence is not None
    other = load_model(str(family(rows)), dtype=torch.float32, attn_implementation="sdpa")
    alone = load_model(str(base), dtype=torch.float32, attn_implementation="sdpa")
    alone.load_state_dict(student.state_dict())
    for row, sample in zip(collect(pack, output.divergence), pack.samples, strict=True):
        common = min(rows, VOCABULARY)
        log_p, log_q = (logits(net, reader, sample)[:, :common].log_softmax(-1) for net in (alone, other))
        left, right = (log_q, log_p) if direction == "forward" else (log_p, log_q)
        places = np.flatnonzero(sample.sampled)
        full = (left.exp() * (left - right)).sum(-1)[places - 1]
        np.testing.assert_allclose(np.asarray(row)[places], full, atol=1e-5)
        assert full.min() > 1e-3


def logits(net: Any, reader: Processor, sample: Sample) -> torch.Tensor:
    """Compute all logits [T, V] of one sample by the model's own forward pass."""
    (pack,) = packs([sample], "padded")
    ours = {"scored", "previous", "images", "image_places"}
    inputs = {name: value for name, value in model_inputs(net, reader, pack).items() if name not in ours}
    with torch.no_grad():
        rows: torch.Tensor = net(**inputs).logits
    return rows[0]


def by_id(rows: list[tuple[int, Floats]]) -> list[Floats]:
    return [row for _, row in sorted(rows, key=lambda pair: pair[0])]


@pytest.mark.parametrize("rows", [400, VOCABULARY])
@pytest.mark.parametrize("offload", [False, True])
def test_rows_behind_the_students_have_no_part_in_the_teachers_distribution(
    family: Callable[[int], Path], rows: int, offload: bool
) -> None:
    student = family(VOCABULARY)
    assert vocabulary_of(str(family(rows)), trust_remote_code=False) == rows
    some = packs(batch(read(student)))
    expected, _ = Reference(ReferenceSettings(**settings(student))).logprobs(some)
    found, counts = teacher(family(rows), student, offload=offload).logprobs(some)
    assert counts["vision/tower_calls"].value > 0
    for row, reference in zip(by_id(found), by_id(expected), strict=True):
        np.testing.assert_allclose(row, reference, atol=1e-6)
    assert max(np.abs(row).max() for row in by_id(found)) > 1


def test_a_token_that_the_teacher_does_not_have_gets_no_grade_and_does_not_stop_it(
    family: Callable[[int], Path],
) -> None:
    student = family(VOCABULARY)
    samples = [sample for sample in batch(read(student)) if not sample.media]
    tokens = samples[0].tokens.copy()
    tokens[-2] = 380
    grading = teacher(family(370), student)
    plain = by_id(grading.logprobs(packs(samples))[0])
    row, *others = by_id(grading.logprobs(packs([replace(samples[0], tokens=tokens), *samples[1:]]))[0])
    assert np.flatnonzero(np.isnan(row)).tolist() == [len(tokens) - 2]
    np.testing.assert_allclose(row[:-2], plain[0][:-2], atol=1e-6)
    for new, old in zip(others, plain[1:], strict=True):
        np.testing.assert_allclose(new, old, atol=1e-6)


def test_a_teacher_of_another_family_is_refused(family: Callable[[int], Path], tmp_path: Path) -> None:
    other = tiny.build("qwen3_vl", tmp_path / "other", size="micro")
    flag = r"algo\.distill\.teacher_model_name_or_path"
    with pytest.raises(ConfigError, match=rf"{flag}: .* reads other (images|tokens) than"):
        teacher(other, family(VOCABULARY))
