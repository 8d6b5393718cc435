import json

import numpy as np
import pytest
from rewards.responses import Picture, conversations, group

from vlmrl.rewards.function_worker import RewardResult
from vlmrl.rewards.protocol import read_request, read_results, reward_requests, write_request, write_results


def request(**fields: object) -> bytes:
    return json.dumps(fields).encode()


ASKED = {"role": "user", "content": "?"}
SHOWN = {"role": "user", "content": [{"type": "image", "image": "x"}]}


def test_conversations_survive_the_wire() -> None:
    sent = [*reward_requests(conversations()), *reward_requests(group("8", media=(Picture(),)))]
    actual = read_request(write_request(sent, "data"), wants_images=True)
    assert [one.query for one in actual] == [one.query for one in sent]
    assert actual[0].query.endswith("6<end><user>no: <pic>again<bot>7")
    assert [one.response for one in actual] == ["7", "eight", "8"]
    assert [(one.is_chat, one.num_prompt_messages) for one in actual] == [(True, 2), (True, 2), (False, 1)]
    assert [[(m.role, m.text) for m in one.messages] for one in actual] == [
        [(m.role, m.text) for m in one.messages] for one in sent
    ]
    assert [[media.size for media in one.all_media] for one in actual] == [[(5, 4), (2, 3)], [(5, 4)], [(5, 4)]]
    assert [[media.size for media in one.media] for one in actual] == [[(5, 4)], [(5, 4)], [(5, 4)]]
    body = json.loads(write_request(sent, "none"))
    assert body["messages"][0][3] == {"role": "user", "content": "no: again"}, (
        "without images there is no trace of them"
    )
    assert body["num_prompt_messages"] == [2, 2, None]
    assert "media" not in body


def test_a_request_survives_the_wire() -> None:
    sent = [
        *reward_requests(group("a", "b", media=(Picture(), Picture()))),
        *reward_requests(group("ç\ud800", label=None)),
    ]
    actual = read_request(write_request(sent, "data"), wants_images=True)
    assert [(q.prompt, q.response, q.label, q.metadata) for q in actual] == [
        (q.prompt, q.response, q.label, q.metadata) for q in sent
    ]
    assert [[m.size for m in q.media] for q in actual] == [[(5, 4), (5, 4)], [(5, 4), (5, 4)], []]
    assert np.array_equal(actual[0].media[1].fetch(), Picture().fetch())


def test_images_are_opened_only_if_needed() -> None:
    sent = reward_requests(group("a", media=(Picture(),)))
    for images in ("none", "hash", "data"):
        assert read_request(write_request(sent, images), wants_images=False)[0].media == ()
    with pytest.raises(ValueError, match=r"image c0ffee is not in media: set reward\.remote_images"):
        read_request(write_request(sent, "hash"), wants_images=True)


def test_the_old_protocol_is_read() -> None:
    (alone,) = read_request(request(query=["2+2=4"]), wants_images=True)
    assert (alone.prompt, alone.response, alone.label) == ("", "2+2=4", None)
    (parsed,) = read_request(request(query=["2+2=4"], prompts=["2+2="], labels=[4], seed=1), wants_images=True)
    assert (parsed.prompt, parsed.response, parsed.label) == ("2+2=", "4", "4")
    assert read_request(request(query=[]), wants_images=True) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"responses": ["x"], "metadata": [{"a": ' + b"[" * 600 + b"]" * 600 + b"}]}", "metadata.0: it is nested"),
        (b"[]", "valid dictionary"),
        (request(prompts=["a"]), "neither query nor responses"),
        (request(responses="abc"), "responses: Input should be a valid list"),
        (request(responses=[None]), r"responses\.0: Input should be a valid string"),
        (request(responses=["a"], labels=["1", "2"]), r"lists of different lengths: {'responses': 1, 'labels': 2}"),
        (request(responses=["a"], metadata=[1]), r"metadata\.0: "),
        (request(responses=["a"], messages=[[{"role": "x", "content": ""}]]), r"messages\.0\.0\.role: Input should be"),
        (request(responses=["a"], messages=[[{"role": "user"}]]), r"messages\.0\.0\.content: Field required"),
        (
            request(responses=["a"], messages=[[ASKED, ASKED]], num_prompt_messages=[2]),
            "2 of the 2 messages of response 0",
        ),
        (request(responses=["a"], messages=[[ASKED, ASKED]], num_prompt_messages=[-1]), "-1 of the 2 messages"),
        (request(responses=["a"], messages=[[]]), "-1 of the 0 messages"),
        (request(responses=["a"], messages=[]), "lists of different lengths"),
        (
            request(responses=["a"], messages=[[SHOWN, ASKED]]),
            "image x is not in media: set reward.remote_images to data",
        ),
        (
            request(responses=["a"], messages=[[SHOWN, ASKED]], media={"x": "/etc/passwd"}),
            "media x is no data:image/ URL",
        ),
        (request(responses=["a"], images=[["x"]], media={"x": "/etc/passwd"}), "media x is no data:image/ URL"),
        (request(responses=["a"], media={"x": "http://127.0.0.1/x.png"}), "media x is no data:image/ URL"),
        (request(responses=["a"], media={"x": "data:image/png;base64,AAAA"}), "media x: "),
        (request(responses=["a"], media={"x": "file:///etc/passwd"}), "media x is no data:image/ URL"),
        (request(responses=["a"], media={"x": "data:image/png,/etc/passwd"}), "media x: "),
        (request(responses=["a"], media={"x\n": "data:image/png;base64,%%"}), "media x: "),
    ],
)
def test_an_invalid_request_is_refused_in_one_line(content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        read_request(content, wants_images=True)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


def test_the_hash_of_an_image_is_not_taken_from_the_client() -> None:
    sent = write_request(reward_requests(group("a", media=(Picture(),))), "data")
    (parsed,) = read_request(sent.replace(b"c0ffee", b"../../evil"), wants_images=True)
    assert parsed.media[0].hash.isalnum()
    assert [media.hash for media in parsed.all_media] == [parsed.media[0].hash]


def test_a_reply_survives_the_wire() -> None:
    sent = [RewardResult(1.5, {"a": 2.0}), RewardResult(problem="it broke"), RewardResult(-1.0, {"b": 0.0})]
    assert json.loads(write_results(sent)) == {
        "rewards": [1.5, None, -1.0],
        "problems": [None, "it broke", None],
        "failures": [None, "response", None],
        "extra_logs": {"a": [2.0, None, None], "b": [None, None, 0.0]},
    }
    assert read_results(write_results(sent), 3) == sent
    assert read_results(write_results([]), 0) == []


@pytest.mark.parametrize("odd", ["NaN", "Infinity", '"long"', "[1.0]", "null", "1" * 400])
def test_an_invalid_logged_value_of_a_server_keeps_the_reward(odd: str) -> None:
    answer = f'{{"rewards": [1.0, 0.5], "extra_logs": {{"length": [{odd}, 3], "style": [0.5, {odd}]}}}}'
    assert read_results(answer.encode(), 2) == [
        RewardResult(1.0, {"style": 0.5}),
        RewardResult(0.5, {"length": 3.0}),
    ]


def test_the_kind_of_a_failure_survives_the_wire() -> None:
    sent = [
        RewardResult(1.0),
        RewardResult(problem="no scorer", blame="infrastructure"),
        RewardResult(problem="no number"),
    ]
    assert read_results(write_results(sent), 3) == sent
    old = b'{"rewards": [null, 1.0], "problems": ["no number", null]}'
    assert [result.failure for result in read_results(old, 2)] == ["response", None]
    with pytest.raises(ValueError, match='replied with 1 "failures" for 2 responses'):
        read_results(b'{"rewards": [null, 1.0], "failures": ["response"]}', 2)
