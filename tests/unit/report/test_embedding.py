from __future__ import annotations

import json

from vlmrl.report.embedding import embedded, embedded_size


def test_nothing_in_the_text_can_end_a_script_or_begin_a_comment() -> None:
    value = {"</script>": "<!--<script>&amp;\u2028\u2029 \ud800 é"}
    text = embedded(value)
    assert not set("<>&\u2028\u2029\ud800") & set(text)
    assert "é" in text
    assert json.loads(text) == value


def test_the_size_counts_bytes_after_escaping() -> None:
    assert embedded_size("<é") == len('"\\u003cé"'.encode()) == 10
