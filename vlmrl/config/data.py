"""The training data, and how their rows become prompts and images."""

from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from vlmrl.config.base import ConflictError, Fraction, PositiveFloat, PositiveInt, Section, Text, Unread


class Columns(Section):
    """Columns, and conversion of rows to prompts, for training and evaluation."""

    input_key: str = "input"
    """Column of the question: a string, or a list of chat messages (also ShareGPT's). Without a column `input`, the one
    of `prompt`, `messages` (not with pairs) and `conversations` that exists."""
    label_key: str = "label"
    """Column of the expected response; dots select a field inside a column, as in `reward_model.ground_truth`. A row
    whose label no response can match (`reward.functions`) is dropped and counted."""
    output_key: str = "answer"
    """Column of the response to learn (`sft`, `rm.kind process`, `dpo.loss kto`); without it `completion`, else the
    label. In messages that end with the assistant's, the last one is the response."""
    image_key: str | None = "images"
    """Column of the images; a row may have none. `none`: no column is read, and `<image>` is plain text."""
    video_key: str | None = None
    """Column of the videos, `videos` by custom; a row may have none. Videos inside messages are read with it too.
    Without it rows with `<video>` are unusable and a dataset with videos is refused, unless this is `none`."""
    input_template: str | None = None
    """Template around the question if no chat template is applied; `{}` is the question."""
    apply_chat_template: bool = True
    """Render the question with the model's chat template."""
    system_prompt: str | None = None
    """System message for questions without one."""
    max_len: PositiveInt = 2048
    """Longest prompt in tokens, image tokens included; a longer row is dropped and counted. For `sft`, pairs of
    responses and `serve-rm`, of prompt and response together."""
    max_images_per_prompt: PositiveInt = 8
    """Maximum number of images in one prompt; a row with more is dropped and counted."""
    min_pixels: PositiveInt = 3136
    """Smaller images are enlarged to this many pixels, for trainer and engine alike."""
    max_pixels: PositiveInt = 1003520
    """Larger images are shrunk to this many pixels, for trainer and engine alike."""
    max_image_pixels: PositiveInt = 89_478_485
    """Maximum decoded pixels of an image file; more is refused as a decompression bomb."""
    max_row_pixels: PositiveInt = 268_435_456
    """Maximum total of decoded pixels of the images of one row; a row with more is dropped and counted."""
    max_image_mib: PositiveInt = 64
    """Largest image file in MiB, also in base64, in Parquet or on the web."""
    image_root: str | None = None
    """Base folder of relative image and video paths; by default that of the dataset file."""
    image_roots: tuple[Text, ...] = ()
    """Further folders whose images and videos a dataset may name. Others are refused: after following symbolic links,
    files must lie below the dataset's own folder or `data.image_root`."""
    allow_image_urls: bool = False
    """Download images and videos that a dataset names by http(s) URL. Private addresses are refused, also after a
    redirect."""
    fps: PositiveFloat = 2.0
    """Frames per second that are taken of a video, as in qwen-vl-utils."""
    fps_min_frames: Annotated[int, Field(ge=2)] = 4
    """At least this many frames are taken of a video, if it has them."""
    fps_max_frames: Annotated[int, Field(ge=2)] = 768
    """At most this many frames are taken of a video, evenly spaced."""
    video_min_pixels: PositiveInt = 100_352
    """Smaller frames are enlarged to this many pixels."""
    video_max_pixels: PositiveInt = 602_112
    """Larger frames are shrunk to this many pixels, though not below 1.05 times `data.video_min_pixels`."""
    video_total_pixels: PositiveInt = 90_316_800
    """Frames are shrunk until half of their pixels together are at most this many (two frames make one patch), though
    not below 1.05 times `data.video_min_pixels`."""
    max_videos_per_prompt: PositiveInt = 1
    """Maximum number of videos in one prompt; a row with more is dropped and counted."""
    max_video_frame_pixels: PositiveInt = 9_437_184
    """Maximum pixels of a frame in the file (4096x2304); more is refused as a decompression bomb."""
    max_video_s: PositiveFloat = 600.0
    """Longest video in seconds; a row with a longer one is dropped and counted."""
    max_video_gpixels: PositiveFloat = 75.0
    """Most pixels, in billions, of the frames that are decoded of a file: those taken, and those that they need, since
    the key frame before each. Ten minutes of 1920x1080 at 60 frames per second have 75, a minute of a core."""
    max_video_mib: PositiveInt = 256
    """Largest video file in MiB, also in base64, in Parquet or on the web."""
    max_dropped_fraction: Fraction = 0.05
    """The run stops when more than this fraction of the rows is unusable."""

    @field_validator("image_key", "video_key")
    @classmethod
    def read_none(cls, key: str | None) -> str | None:
        """Read `none`, which YAML takes for a string."""
        return None if key == "none" else key

    @model_validator(mode="after")
    def check_pixels(self) -> Self:
        if self.min_pixels > self.max_pixels:
            raise ConflictError([f"data.min_pixels {self.min_pixels} is above data.max_pixels {self.max_pixels}"])
        for low, high in (("fps_min_frames", "fps_max_frames"), ("video_min_pixels", "video_max_pixels")):
            if getattr(self, low) > getattr(self, high):
                raise ConflictError([f"data.{low} {getattr(self, low)} is above data.{high} {getattr(self, high)}"])
        return self


COLUMN_KEYS: dict[str, str | None] = {
    name: Columns.model_fields[name].default
    for name in ("input_key", "label_key", "output_key", "image_key", "video_key")
}
"""Settings that name a column -> their defaults."""


class Data(Columns):
    """The training data."""

    prompt_dataset: Text
    """Dataset: a name in `datasets/` (`visual_math?families=count+clock&size=2000`), a .jsonl/.json/.parquet/.csv/.tsv
    file, a `save_to_disk` folder, a folder of images or a Hub id. Several are separated by commas; the columns of
    a single one follow its name, `my.jsonl:input_key=problem:label_key=solution`."""
    prompt_probs: tuple[Annotated[float, Field(gt=0.0)], ...] | None = None
    """Proportions in which several datasets are mixed; by default their numbers of rows."""
    prompt_split: str = "train"
    """Split of the dataset."""
    max_samples: PositiveInt = 100_000_000
    """Use at most this many rows of each dataset."""
    eval_fraction: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Fraction of each dataset's rows that is held out of training, chosen by `train.seed`, and evaluated like
    `eval.dataset`. Rows with the same prompt (question and images) are never divided, also over datasets."""


VIDEO_SETTINGS = (
    *("fps", "fps_min_frames", "fps_max_frames", "video_min_pixels", "video_max_pixels", "video_total_pixels"),
    *("max_videos_per_prompt", "max_video_frame_pixels", "max_video_s", "max_video_gpixels", "max_video_mib"),
)
"""Settings that are read only with `data.video_key`."""


def unread_of_columns(columns: Columns) -> Unread:
    unread: Unread = {}
    if columns.apply_chat_template:
        unread["data.input_template"] = "data.apply_chat_template is on, and the model's chat template replaces it"
    if columns.video_key is None:
        unread |= {f"data.{name}": "data.video_key is none, so no videos are read" for name in VIDEO_SETTINGS}
    return unread


def conflicts_of_data(data: Data) -> list[str]:
    if data.prompt_probs is None:
        return []
    num_datasets = sum(bool(part.strip()) for part in data.prompt_dataset.split(","))
    if len(data.prompt_probs) == num_datasets:
        return []
    return [
        f"data.prompt_probs has {len(data.prompt_probs)} values for the {num_datasets} datasets of data.prompt_dataset"
    ]
