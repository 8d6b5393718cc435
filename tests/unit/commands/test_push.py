"""`vlmrl push` with the real client of the Hub, against a server that keeps what it gets."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from safetensors.numpy import save_file

from vlmrl.cli import main
from vlmrl.observe.lock import run_lock

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning")  # of the Hub's client
TOKEN = "hf_0123456789abcdef"


class Hub:
    """The requests of the Hub's API that an upload makes: small files come in the commit, large ones before it."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.objects: dict[str, bytes] = {}
        self.refuse = 0
        self.url = ""
        self.app = FastAPI()
        self.app.add_api_route("/api/repos/create", self.create, methods=["POST"])
        self.app.add_api_route("/api/validate-yaml", self.validate, methods=["POST"])
        self.app.add_api_route("/api/models/{owner}/{name}", self.info, methods=["GET"])
        self.app.add_api_route("/api/models/{owner}/{name}/tree/main", self.tree, methods=["GET"])
        self.app.add_api_route("/api/models/{owner}/{name}/preupload/main", self.preupload, methods=["POST"])
        self.app.add_api_route("/{owner}/{name}.git/info/lfs/objects/batch", self.batch, methods=["POST"])
        self.app.add_api_route("/objects/{oid}", self.put, methods=["PUT"])
        self.app.add_api_route("/api/models/{owner}/{name}/commit/main", self.commit, methods=["POST"])

    async def create(self, request: Request) -> Response:
        if self.refuse or request.headers["authorization"] != f"Bearer {TOKEN}":
            return JSONResponse({"error": f"refused {TOKEN}"}, self.refuse or 401)
        body = await request.json()
        name = f"{body.get('organization') or 'me'}/{body['name']}"
        url = {"url": f"{self.url}/{name}"}
        if name in self.repos:
            return JSONResponse({"error": "You already created this model repo"} | url, 409)
        self.repos[name], self.private[name] = {}, body.get("visibility") == "private"
        return JSONResponse(url)

    async def validate(self, request: Request) -> Response:
        text = (await request.json())["content"]
        errors = [{"message": "license must be one of ..."}] if "license: mine" in text else []
        return JSONResponse({"errors": errors, "warnings": []}, 400 if errors else 200)

    async def info(self, owner: str, name: str) -> Response:
        repo = f"{owner}/{name}"
        if repo == "owner/base":
            return JSONResponse({"id": repo, "cardData": {"license": "apache-2.0"}})
        if repo not in self.repos:
            return JSONResponse({"error": "Repository not found"}, 404, headers={"X-Error-Code": "RepoNotFound"})
        return JSONResponse({"id": repo, "private": self.private[repo]})

    async def tree(self, owner: str, name: str) -> Response:
        files = self.repos[f"{owner}/{name}"].items()
        return JSONResponse([{"type": "file", "path": path, "size": len(data), "oid": "0"} for path, data in files])

    async def preupload(self, request: Request) -> Response:
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
            }
            for file in (await request.json())["files"]
        ]
        return JSONResponse({"files": files})

    async def batch(self, request: Request) -> Response:
        objects = [
            entry | {"actions": {"upload": {"href": f"{self.url}/objects/{entry['oid']}"}}}
            for entry in (await request.json())["objects"]
        ]
        return JSONResponse({"transfer": "basic", "objects": objects})

    async def put(self, oid: str, request: Request) -> Response:
        self.objects[oid] = await request.body()
        return Response()

    async def commit(self, owner: str, name: str, request: Request) -> Response:
        files = self.repos[f"{owner}/{name}"]
        for line in (await request.body()).splitlines():
            operation = json.loads(line)
            value: dict[str, Any] = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                files[value["path"]] = self.objects[value["oid"]]
            elif operation["key"] == "deletedFile":
                del files[value["path"]]
        url = f"{self.url}/{owner}/{name}/commit/abc"
        return JSONResponse({"success": True, "commitUrl": url, "commitOid": "abc", "pullRequestUrl": None})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        hub.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub._commit_api.is_xet_available", lambda: False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        server = uvicorn.Server(uvicorn.Config(hub.app, log_level="error"))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])))
        thread.start()
        yield hub
        server.should_exit = True
        thread.join()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a finished run."""
    folder = tmp_path / "run" / "model"
    folder.mkdir(parents=True)
    save_file({"a": np.arange(8, dtype=np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "README.md").write_text('---\nbase_model: owner/base\ntags: [vlmrl]\n---\n"path/to/this/folder"\n')
    return tmp_path / "run"


def test_a_model_is_uploaded_as_it_is(hub: Hub, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push", str(run), "--repo", "tiny"]) == 0
    files = hub.repos["me/tiny"]
    assert files.keys() == {"README.md", "config.json", "model.safetensors"}
    assert files["model.safetensors"] == (run / "model" / "model.safetensors").read_bytes()
    card = files["README.md"].decode()
    assert '"me/tiny"' in card
    assert "license: apache-2.0" in card, "of the base, from the Hub"
    assert not hub.private["me/tiny"]
    out = capsys.readouterr().out
    assert "model.safetensors" in out
    assert f"pushed: {hub.url}/me/tiny" in out


def test_weights_of_an_earlier_push_do_not_stay(hub: Hub, run: Path) -> None:
    assert main(["push", str(run), "--repo", "me/tiny"]) == 0
    hub.repos["me/tiny"] |= {"model-00001-of-00002.safetensors": b"", "notes.txt": b"mine"}
    (run / "model" / "config.json").write_text("{}")
    assert main(["push", str(run), "--repo", "me/tiny"]) == 0
    assert hub.repos["me/tiny"].keys() == {"README.md", "config.json", "model.safetensors", "notes.txt"}
    assert hub.repos["me/tiny"]["config.json"] == b"{}"


def test_a_private_repository(hub: Hub, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push", str(run), "--repo", "org/secret", "--private"]) == 0
    assert hub.private["org/secret"]
    assert main(["push", str(run), "--repo", "me/open"]) == 0
    before = dict(hub.repos["me/open"])
    (run / "model" / "config.json").write_text('{"secret": 1}')
    assert main(["push", str(run), "--repo", "me/open", "--private"]) == 2
    assert "me/open exists and is public" in capsys.readouterr().err
    assert hub.repos["me/open"] == before


@pytest.mark.parametrize("status", [401, 403, 500])
def test_what_the_hub_refuses_is_one_line_without_the_token(
    hub: Hub, run: Path, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.refuse = status
    assert main(["push", str(run), "--repo", "me/tiny"]) == 2
    err = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"the Hub refuses it ({status})" in err
    assert TOKEN not in err
    assert ("write permission" in err) == (status < 500)


def test_metadata_that_the_hub_refuses(hub: Hub, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "model" / "README.md").write_text("---\nlicense: mine\n---\n")
    assert main(["push", str(run), "--repo", "me/tiny"]) == 2
    err = capsys.readouterr().err.strip().splitlines()[-1]
    assert "README.md" in err
    assert "license must be one of" in err


def test_no_connection_and_no_token(
    hub: Hub, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert main(["push", str(run), "--repo", "me/tiny"]) == 2
    assert "the upload to http://127.0.0.1:9 failed" in capsys.readouterr().err
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(run / "none"))
    assert main(["push", str(run), "--repo", "me/tiny"]) == 2
    assert "there is no token of the Hub: set HF_TOKEN" in capsys.readouterr().err
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["push", str(run), "--repo", "me/tiny"]) == 2
    assert "HF_HUB_OFFLINE is set" in capsys.readouterr().err
    assert not hub.repos


def test_a_dry_run_needs_neither_token_nor_network(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    (run / "model" / "optimizer.pt").touch()
    assert main(["push", str(run / "model"), "--repo", "me/tiny", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert f"{(run / 'model' / 'model.safetensors').stat().st_size:,}  model.safetensors" in out
    assert "left out: optimizer.pt" in out
    assert "nothing was uploaded" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["RUN"], "--push.repo is missing"),
        (["RUN", "--repo", "a/b/c"], "push.repo: Repo id must be"),
        (["RUN/nowhere", "--repo", "me/x"], "push.run: there is no folder"),
        (["RUN", "--repo", "me/x", "--model", "bestest"], "push.model bestest: a run has model, adapter, best"),
        (["RUN", "--repo", "me/x", "--model", "critic"], "has no critic: it has model: name one with --model"),
        (["RUN", "--repo", "me/x", "--base", "/models/base"], "push.base: /models/base is not a name on the Hub"),
        (["RUN", "--rep", "me/x"], "--rep: no such setting; did you mean --push.repo?"),
    ],
)
def test_wrong_words_are_one_line(
    words: list[str], message: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", *(word.replace("RUN", str(run)) for word in words), "--dry-run"]) == 2
    assert message in capsys.readouterr().err


def test_a_run_that_has_not_ended_says_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "model").rename(run / "best")
    assert main(["push", str(run), "--repo", "me/x", "--dry-run"]) == 2
    assert "has no model or adapter: it has best: name one with --model" in capsys.readouterr().err
    assert main(["push", str(run), "--repo", "me/x", "--model", "best", "--dry-run"]) == 0
    (run / "best").rename(run / "checkpoints")
    (run / "checkpoints" / "step_000004").mkdir()
    assert main(["push", str(run), "--repo", "me/x", "--dry-run"]) == 2
    assert "the run has not ended; resume it with --ckpt.load_enable" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["run", "run/model", "linked"])
def test_a_model_that_a_run_may_replace_is_not_uploaded(
    name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "linked").symlink_to(run / "model")
    words = ["push", str(tmp_path / name), "--repo", "me/x", "--dry-run"]
    with run_lock(run, on_lost=pytest.fail):
        assert main(words) == 2
    assert "is in use by process" in capsys.readouterr().err
    assert main(words) == 0


def test_a_missing_card_is_written_from_the_files_of_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "model" / "README.md").unlink()
    (run / "config.yaml").write_text(
        "# Written by vlmrl: vlmrl sft --config config.yaml repeats the run\n"
        "actor: {model_name_or_path: owner/base}\ndata: {prompt_dataset: gsm8k}\n"
    )
    (run / "critic").mkdir()
    (run / "critic" / "README.md").write_text("of an earlier step")
    assert main(["push", str(run), "--repo", "me/x", "--dry-run"]) == 0
    assert (run / "critic" / "README.md").read_text() == "of an earlier step"
    assert "supervised fine-tuning" in (run / "model" / "README.md").read_text()
    (run / "model" / "README.md").unlink()
    (run / "config.yaml").unlink()
    assert main(["push", str(run), "--repo", "me/x", "--dry-run"]) == 0
    assert "has no model card" in capsys.readouterr().out
