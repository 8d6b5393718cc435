from pathlib import Path

import numpy as np
import pytest

from vlmrl.commands.bench.samples import make_samples, random_experience
from vlmrl.config.bench import SyntheticBatch
from vlmrl.errors import ConfigError
from vlmrl.models import tiny
from vlmrl.plugins import Processor, processor


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Processor:
    return _read(tiny.build("qwen2_5_vl", tmp_path_factory.mktemp("vl") / "model", size="micro"))


def _read(folder: Path) -> Processor:
    return processor(str(folder), min_pixels=3136, max_pixels=100_000)


def test_prompts_and_responses_have_the_given_lengths(reader: Processor) -> None:
    sizes = SyntheticBatch(groups=2, n_samples_per_prompt=2, prompt_tokens=20, response_tokens=(3, 5, 4), image_size=56)
    samples = make_samples(reader, 384, sizes, seed=0)
    assert [sample.prompt_length for sample in samples] == [20] * 4
    # Three lengths, assigned in turn to four responses.
    assert [len(sample.tokens) - 20 for sample in samples] == [3, 5, 4, 3]
    assert [sample.group for sample in samples] == [0, 0, 1, 1]


def test_only_responses_to_one_prompt_share_tokens_and_images(reader: Processor) -> None:
    sizes = SyntheticBatch(groups=2, n_samples_per_prompt=2, prompt_tokens=20, image_size=56, images_per_prompt=2)
    first, second, other, _ = make_samples(reader, 384, sizes, seed=0)
    assert (first.tokens[:20] == second.tokens[:20]).all()
    assert first.media == second.media
    assert len({item.hash for item in (*first.media, *other.media)}) == 4
    assert not (first.media[0].fetch() == other.media[0].fetch()).all()
    # 56 x 56 pixels are 2 x 2 tokens of 28 x 28.
    assert (reader.token_types(first.tokens) == 1).sum() == 2 * 4


def test_text_has_no_image_tokens(reader: Processor) -> None:
    sizes = SyntheticBatch(groups=4, prompt_tokens=500)
    for sample in make_samples(reader, 384, sizes, seed=0):
        assert sample.media == ()
        assert not np.isin(sample.tokens, reader.banned_tokens).any()


def test_images_are_rounded_to_whole_patches(reader: Processor) -> None:
    (sample,) = make_samples(reader, 384, SyntheticBatch(groups=1, n_samples_per_prompt=1, image_size=100), seed=0)
    # 100 / 28 = 3.6: four patches of 28 a side.
    assert sample.media[0].size == (112, 112)
    assert sample.media[0].fetch().shape == (112, 112, 3)


def test_images_that_do_not_fit_into_the_prompt_are_refused(reader: Processor) -> None:
    with pytest.raises(ConfigError, match=r"bench\.prompt_tokens 6 leaves no room for text after the 6 tokens"):
        make_samples(reader, 384, SyntheticBatch(prompt_tokens=6, image_size=56), seed=0)


def test_images_are_refused_for_a_text_model(tmp_path: Path) -> None:
    text = _read(tiny.build("qwen3", tmp_path / "model", size="micro"))
    with pytest.raises(ConfigError, match=r"bench\.image_size 56: the model takes no images"):
        make_samples(text, 384, SyntheticBatch(image_size=56), seed=0)
    assert len(make_samples(text, 384, SyntheticBatch(groups=1, n_samples_per_prompt=3), seed=0)) == 3


def test_advantages_are_one_number_per_response(reader: Processor) -> None:
    samples = make_samples(reader, 384, SyntheticBatch(groups=1, n_samples_per_prompt=2, prompt_tokens=9), seed=0)
    old = [np.zeros(len(sample.tokens), dtype=np.float32) for sample in samples]
    advantages = random_experience(samples, old, seed=0).advantages
    assert [len(set(row[:9].tolist())) for row in advantages] == [1, 1]
    assert [row[:9].any() for row in advantages] == [False, False]
    assert [len(set(row[9:].tolist())) for row in advantages] == [1, 1]
    assert advantages[0][-1] != advantages[1][-1]
