"""Reads the images of requests as far as a prompt needs it: their bytes, sizes and digests. No pixel is decoded."""

from __future__ import annotations

import asyncio
import binascii
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from lightserve.errors import InvalidRequestError
from lightserve.media.audio.compressed import as_wav
from lightserve.media.audio.wav import read_header as read_wav_header
from lightserve.media.fetch.fetcher import Fetcher
from lightserve.media.image_file import read_header
from lightserve.media.layout import ImageLayout
from lightserve.media.sizes import NO_LIMITS, ImageHeader, PixelLimits
from lightserve.media.sources import MAX_FRAMES, ImageSource, ReadImage
from lightserve.media.stats import ImageStats
from lightserve.media.tokens import check_kind, check_places, digest_of, expand, fill_pairs, locate
from lightserve.media.video_file import PixelBudget, frame_named, pack_frames, read_animation, read_frames
from lightserve.media.video_texts import VideoTexts
from lightserve.messages.media import ImageItem
from lightserve.outbound.urls import is_fetched

DATA_URL = re.compile(r"data:([\w.+/-]*)((?:;[\w.=+-]+)*),", re.ASCII)
MB = 10**6
MAX_URLS = 256  # of a request that are fetched, if it may not have more media


def _no_tokenizer(text: str) -> list[int]:
    raise InvalidRequestError("images of this model need its tokenizer, and the server has none")


@dataclass(frozen=True, slots=True)
class ImageReader:
    layout: ImageLayout
    placeholder: int  # the token id that stands for an image in a prompt
    placeholder_text: str
    limits: Mapping[str, int]  # of a request, by kind
    max_bytes: int  # of a file
    fetcher: Fetcher | None = None  # None: images of other servers are refused
    pair: tuple[int, int] | None = None  # the token ids before and after an image in a prompt; None: it has none
    encode: Callable[[str], list[int]] = _no_tokenizer
    video: VideoTexts | None = None  # None: the model reads no videos
    stats: ImageStats = field(default_factory=ImageStats)

    async def read_all(
        self, sources: Sequence[ImageSource], salt: str, limits: PixelLimits = NO_LIMITS
    ) -> list[ReadImage]:
        """``salt``: only requests of the same salt share embeddings."""
        self._check(sources)
        reader = self if limits.is_empty else replace(self, layout=self.layout.within(limits))
        with self.stats.reading():
            files = await self._fetch_all(sources)
            return await asyncio.to_thread(reader._read_all, sources, salt, files)

    def _check(self, sources: Sequence[ImageSource]) -> None:
        """Before any file is fetched."""
        for number, source in numbered(sources):
            if not self._reads(source):
                self.stats.refused("file")
                remedy = "; send some of its frames as images" if source.is_video else ""
                raise _of_image(number, source, f"this model reads no {source.name}s{remedy}")
        for kind, number in Counter(source.kind for source in sources).items():
            if number > (limit := self.limits.get(kind, 0)):
                self.stats.refused("number")
                name = next(source.name for source in sources if source.kind == kind)
                raise InvalidRequestError(
                    f"the request has {number} {name}s; the limit is {limit} (--limit_mm_per_prompt)", sources[0].param
                )
        for number, source in numbered(sources):
            if len(source.frames) > MAX_FRAMES:
                self.stats.refused("number")
                problem = f"it has more than {MAX_FRAMES} frames; send fewer"
                raise _of_image(number, source, problem)

    def _reads(self, source: ImageSource) -> bool:
        has_texts = not source.is_video or self.video is not None
        return has_texts and source.kind in self.layout.kinds

    async def _fetch_all(self, sources: Sequence[ImageSource]) -> dict[str, bytes]:
        """The files of other servers by URL, each fetched once. The first that fails ends the other fetches."""
        wanted: dict[str, tuple[int, ImageSource]] = {}
        for number, source in numbered(sources):
            for url in filter(is_fetched, source.urls):
                wanted.setdefault(url, (number, replace(source, url=url)))
        if not wanted:
            return {}
        if len(wanted) > (limit := max(MAX_URLS, *self.limits.values())):
            self.stats.refused("number")
            text = f"the request has {len(wanted)} URLs of other servers; the limit is {limit}; send data: URLs"
            raise InvalidRequestError(text, sources[0].param)
        fetched = Counter[tuple[str, int]]()
        try:
            async with asyncio.TaskGroup() as tasks:
                files = {url: tasks.create_task(self._fetch(*named, fetched)) for url, named in wanted.items()}
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        return {url: task.result() for url, task in files.items()}

    async def _fetch(self, number: int, source: ImageSource, fetched: Counter[tuple[str, int]]) -> bytes:
        """``fetched``: bytes by the kind and number of a source, of which a video has several files."""
        if self.fetcher is None:
            self.stats.refused("fetch")
            raise _of_image(number, source, "this server fetches no URLs (--no_media_urls); send it as a data: URL")
        try:
            with self.stats.fetching():
                data = await self.fetcher.fetch(source.url)
            fetched[source.kind, number] += len(data)
            self._check_bytes(fetched[source.kind, number], source)
            return data
        except InvalidRequestError as error:
            raise _of_image(number, source, error) from error

    def _read_all(self, sources: Sequence[ImageSource], salt: str, files: Mapping[str, bytes]) -> list[ReadImage]:
        if len(sources) > 1 and self.layout.shows_wholes_of_several:
            sources = [replace(source, is_low=True) for source in sources]
        budget = PixelBudget()
        return [self._read(source, salt, files, number, budget) for number, source in numbered(sources)]

    def _read(
        self, source: ImageSource, salt: str, files: Mapping[str, bytes], number: int, budget: PixelBudget
    ) -> ReadImage:
        try:
            read = [self._file(source, index, files) for index in range(len(source.urls))]
            if source.is_video:
                return self._read_video(source, salt, read, budget)
            if source.kind == "audio":
                return self.read_sound(read[0], salt)
            size = self.layout.size_of(read_header(read[0]), source.is_low)
        except InvalidRequestError as error:
            self.stats.refused("file")
            raise _of_image(number, source, error) from error
        return ReadImage(digest_of(read[0], f"{size.height}x{size.width}", salt), size, read[0])

    def read_sound(self, data: bytes, salt: str) -> ReadImage:
        data = as_wav(data, self.layout.largest.seconds)
        size = self.layout.sound_size_of(read_wav_header(data))
        return ReadImage(digest_of(data, f"{size.height}x{size.width}", salt, "audio"), size, data)

    def _read_video(self, source: ImageSource, salt: str, files: Sequence[bytes], budget: PixelBudget) -> ReadImage:
        self._check_bytes(sum(map(len, files)), source)
        header = read_frames(files, source.fps, budget) if source.frames else read_animation(files[0], budget)
        size = self.layout.video_size_of(header, bool(source.frames))
        data = pack_frames(files) if source.frames else files[0]
        options = f"{size.height}x{size.width}", salt, f"video {size.frames} {size.times}"
        return ReadImage(digest_of(data, *options), size, data)

    def _file(self, source: ImageSource, index: int, files: Mapping[str, bytes]) -> bytes:
        url = source.urls[index]
        if url in files:
            return files[url]
        with frame_named(index + 1) if source.frames else nullcontext():
            return self._bytes_of(url, source)

    def _bytes_of(self, url: str, source: ImageSource) -> bytes:
        match = DATA_URL.match(url)
        if match is None:
            scheme = url.partition(":")[0][:10]
            raise InvalidRequestError(
                f"its URL begins with {scheme!r}; only data: URLs (data:image/png;base64,...) and https: URLs are read"
            )
        if not match[2].endswith(";base64"):
            raise InvalidRequestError("a data: URL needs ;base64 before its comma")
        text = _without_line_breaks(url[match.end() :])
        self._check_bytes(len(text) * 3 // 4 - 2, source)
        try:
            return binascii.a2b_base64(text.encode("ascii"), strict_mode=True)
        except (binascii.Error, UnicodeEncodeError) as error:
            raise InvalidRequestError("its data is not base64") from error

    def _check_bytes(self, count: int, source: ImageSource) -> None:
        if count > self.max_bytes:
            flag = "--max_audio_mb" if source.kind == "audio" else "--max_image_mb"
            raise InvalidRequestError(f"it has more than {self.max_bytes // MB} MB ({flag}); send it smaller")

    def write(self, prompt: str, images: Sequence[ReadImage]) -> str:
        """The prompt with the texts of images, and a placeholder for each run of their tokens.

        It is done before the prompt becomes tokens: a text may become one token with what stands beside it.
        """
        if not any(image.size.texts or image.size.frames for image in images):
            return prompt
        video = "" if self.video is None else self.video.marker
        pieces = re.split("|".join(f"({re.escape(marker)})" for marker in (video, self.marker) if marker), prompt)
        return "".join(self._replaced(pieces, images, 1 + bool(video)))

    def _replaced(self, pieces: Sequence[str | None], images: Sequence[ReadImage], kinds: int) -> Iterator[str]:
        """``pieces``: a text, and then the marker of a video, or else that of an image, and so on."""
        check_places(len(pieces) // (1 + kinds), len(images))
        shown = iter(images)
        for number, piece in enumerate(pieces):
            if number % (1 + kinds) == 0:
                yield piece or ""
            elif piece is not None:
                image = next(shown)
                check_kind(is_video=kinds == 2 and number % 3 == 1, is_wanted=bool(image.size.frames))
                yield self._shown(image)

    def write_ids(self, prompt_ids: Sequence[int], images: Sequence[ReadImage]) -> list[int]:
        """As ``write``, in a prompt that a client has made tokens of."""
        if not any(image.size.texts for image in images):
            return list(prompt_ids)
        (marker,) = self.encode(self.marker)
        check_places(sum(token_id == marker for token_id in prompt_ids), len(images))
        shown = iter(images)
        pieces = [self.encode(self._shown(next(shown))) if each == marker else [each] for each in prompt_ids]
        return [token_id for piece in pieces for token_id in piece]

    @property
    def marker(self) -> str:
        """What stands in a prompt for an image, before ``write``."""
        return self.layout.marker or self.placeholder_text

    def _shown(self, image: ReadImage) -> str:
        if self.video is not None and image.size.frames:
            return self.video.shown(self.placeholder_text, image.size)
        return self.placeholder_text.join(image.size.texts or ("", ""))

    def image_of_size(self, header: ImageHeader) -> ReadImage:
        """To count its tokens."""
        return ReadImage(b"", self.layout.size_of(header), b"")

    @property
    def image_ids(self) -> list[int]:
        """What a prompt has in place of an image, before ``write_ids`` and ``expand``."""
        if self.pair is None:
            return [self.placeholder] if self.layout.marker is None else self.encode(self.layout.marker)
        return [self.pair[0], self.placeholder, self.pair[1]]

    def fill_pairs(self, prompt_ids: Sequence[int]) -> list[int]:
        """The prompt with a placeholder in each empty pair, as clients of LightLLM write an image."""
        return list(prompt_ids) if self.pair is None else fill_pairs(prompt_ids, self.pair, self.placeholder)

    def expand(self, prompt_ids: Sequence[int], images: Sequence[ReadImage]) -> list[int]:
        """The prompt with a placeholder for each token of an image, in place of one for each run of them."""
        return expand(prompt_ids, self.placeholder, _runs(images))

    def locate(self, prompt_ids: Sequence[int], images: Sequence[ReadImage]) -> tuple[ImageItem, ...]:
        """The images of a prompt that ``expand`` has made longer, and which may have other tokens around it."""
        starts = iter(locate(prompt_ids, self.placeholder, _runs(images)))
        return tuple(self._item(image, [next(starts) for _ in image.size.runs]) for image in images)

    def _item(self, image: ReadImage, starts: Sequence[int]) -> ImageItem:
        size = image.size
        spans = tuple(zip(starts, size.runs, strict=True))
        pixels = size.height, size.width
        places = spans, size.rows, size.columns
        video = size.frames, size.times
        return ImageItem(image.digest, *places, *pixels, self.placeholder, image.data, *video)


def numbered(sources: Sequence[ImageSource]) -> Iterator[tuple[int, ImageSource]]:
    """With the number of each among those of its kind."""
    counts = Counter[str]()
    for source in sources:
        counts[source.kind] += 1
        yield counts[source.kind], source


def _without_line_breaks(text: str) -> str:
    """base64 as MIME has it, which Ruby's encode64 and Python's encodebytes write."""
    return text.replace("\r", "").replace("\n", "") if "\n" in text else text


def _runs(images: Sequence[ReadImage]) -> list[int]:
    return [count for image in images for count in image.size.runs]


def _of_image(number: int, source: ImageSource, problem: object) -> InvalidRequestError:
    return InvalidRequestError(f"{source.name} {number} of the request: {problem}", source.param)
