from vlmrl.config.data import Columns
from vlmrl.data.prompts import PromptStream
from vlmrl.data.responses import sft_sample
from vlmrl.data.rows import load_rows
from vlmrl.plugins import Processor


def test_the_answer_and_its_end_token_are_sampled(vlm: Processor) -> None:
    rows = load_rows("visual_math?families=count&size=3&pixels=112", split="train", max_samples=9, seed=0)
    prompt = PromptStream([rows], probs=None, processor=vlm, columns=Columns(), seed=0).draw(1)[0]
    sample = sft_sample(prompt, "42", vlm)
    num_prompt = len(prompt.tokens)
    assert sample.tokens[:num_prompt].tolist() == prompt.tokens.tolist()
    assert sample.sampled.tolist() == [False] * num_prompt + [True] * 3
    assert sample.tokens[num_prompt:].tolist() == [
        ord("4"),
        ord("2"),
        vlm.tokenizer.convert_tokens_to_ids("<|im_end|>"),
    ]
    assert sample.media == prompt.media


def test_an_answer_cannot_contain_an_image_token(vlm: Processor) -> None:
    rows = load_rows("arithmetic?size=3", split="train", max_samples=9, seed=0)
    prompt = PromptStream([rows], probs=None, processor=vlm, columns=Columns(), seed=0).draw(1)[0]
    sample = sft_sample(prompt, "<|image_pad|><|im_end|>", vlm)
    assert not set(sample.tokens.tolist()) & set(vlm.banned_tokens)
    assert vlm.decode(sample.tokens).endswith("<|image_pad|><|im_end|>")
