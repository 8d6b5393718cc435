"""Generate from the model in a folder with Transformers and with vLLM, without vlmrl in the process.

    python plain_engine.py FOLDER

The last line of output is JSON: the four greedy tokens of each after the same question.
"""

import json
import sys


def tokens_of_both(model: str) -> dict[str, list[int]]:
    import torch
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration
    from vllm import LLM, SamplingParams

    tokenizer = AutoProcessor.from_pretrained(model).tokenizer
    question = tokenizer("<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n").input_ids
    net = Qwen2_5_VLForConditionalGeneration.from_pretrained(model, dtype=torch.float32)
    prompt = torch.tensor([question])
    generated = net.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False)
    engine = LLM(model, dtype="float32", max_model_len=256, enforce_eager=True, kv_cache_memory_bytes=2**28)
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    output = engine.generate({"prompt_token_ids": question}, greedy, use_tqdm=False)[0]
    return {"transformers": generated[0, len(question) :].tolist(), "vllm": list(output.outputs[0].token_ids)}


if __name__ == "__main__":
    tokens = tokens_of_both(sys.argv[1])
    assert not [name for name in sys.modules if name.partition(".")[0] == "vlmrl"]
    print(json.dumps(tokens), flush=True)
