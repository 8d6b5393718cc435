from chat_templates import text_processor
from prompt_streams import numbered, stream

from vlmrl.data.rows import load_all


def test_rows_have_a_number_and_no_question() -> None:
    (episodes,) = load_all("episodes?size=5", split="train", max_samples=4, seed=3)
    prompts = stream(episodes, numbered(4), processor=text_processor("chatml")).draw(8)
    assert len({prompt.text for prompt in prompts}) == 8
    assert {(prompt.source.partition(":")[0], prompt.has_question) for prompt in prompts} == {
        ("episodes", False),
        ("mine", True),
    }
