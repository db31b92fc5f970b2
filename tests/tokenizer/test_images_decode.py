"""Image files, good and bad, through the decoder and its worker processes."""

from __future__ import annotations

import io
import os
import signal
import struct
import zlib
from collections.abc import AsyncIterator

import numpy as np
import pytest
from PIL import Image

from services.tokenizer.images.decode import DecodeLimits, ImageDecoder
from services.tokenizer.images.decode_worker import answer, decoded
from services.tokenizer.images.errors import ImageError
from services.tokenizer.images.sizing import SmartResize
from services.tokenizer.images.source import data_of
from tests.tokenizer.pictures import file_of, noise, url_of

SIZING = SmartResize(32, 32 * 32, 256 * 256)
MANY = 1 << 26


def pixels_of(data: bytes) -> np.ndarray:
    return np.asarray(decoded(data, MANY))


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of_nothing(width: int, height: int) -> bytes:
    """A PNG file that announces a size and holds no pixels."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    empty = png_chunk(b"IDAT", zlib.compress(b"")) + png_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + header + empty


def animation(kind: str) -> bytes:
    frames = [Image.fromarray(noise(20, 20, seed)) for seed in range(3)]
    return file_of(frames[0], kind, save_all=True, append_images=frames[1:])


PICTURE = noise(40, 60)
BAD = {
    "no bytes": (b"", "no PNG, JPEG, WebP or GIF"),
    "a text": (b"GET / HTTP/1.1\r\n\r\n" * 9, "no PNG, JPEG, WebP or GIF"),
    "another format": (file_of(PICTURE, "BMP"), "no PNG, JPEG, WebP or GIF"),
    "cut PNG": (file_of(PICTURE)[:-900], "corrupt or cut off"),
    "cut JPEG": (file_of(PICTURE, "JPEG")[:400], "corrupt or cut off"),
    "cut WebP": (file_of(PICTURE, "WEBP")[:200], "corrupt or"),
    "flipped bits": (file_of(PICTURE).replace(b"IDAT", b"IDAT\xff\xff", 1), "corrupt or cut off"),
    "no pixels in it": (png_of_nothing(64, 64), "corrupt or cut off"),
    "no width": (png_of_nothing(0, 64), "corrupt or"),
    "no height": (png_of_nothing(64, 0), "corrupt or"),
    "a bomb": (png_of_nothing(100_000, 90_000), "100000 x 90000 pixels, more than the 67108864"),
    "moving GIF": (animation("GIF"), "animated"),
    "moving PNG": (animation("PNG"), "animated"),
    "moving WebP": (animation("WEBP"), "animated"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_file_is_refused_with_its_reason(name: str) -> None:
    data, message = BAD[name]
    with pytest.raises(ImageError, match=message):
        decoded(data, MANY)
    reply = answer(b"auto\n" + data, SIZING, MANY)
    assert reply.startswith(b'{"error"') and b"Traceback" not in reply and b"0x" not in reply


@pytest.mark.parametrize("kind", ["PNG", "GIF", "WEBP", "JPEG"])
def test_still_pictures_of_every_format(kind: str) -> None:
    grey = np.repeat(noise(30, 50)[:, :, :1] // 64 * 64, 3, axis=2)
    lossless = {"lossless": True} if kind == "WEBP" else {}
    decoded_pixels = pixels_of(file_of(grey, kind, **lossless)).astype(int)
    assert decoded_pixels.shape == grey.shape
    if kind != "JPEG":
        assert np.array_equal(decoded_pixels, grey)


@pytest.mark.parametrize(("orientation", "turns"), [(1, 0), (3, 2), (6, -1), (8, 1)])
def test_orientation_turns_the_picture_upright(orientation: int, turns: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert np.array_equal(pixels_of(file_of(PICTURE, exif=exif)), np.rot90(PICTURE, turns))


def test_transparent_picture_lies_on_white() -> None:
    alpha = np.linspace(0, 255, 40 * 60).reshape(40, 60, 1).astype(np.uint8)
    image = Image.fromarray(np.concatenate([PICTURE, alpha], axis=2))
    share = alpha / 255
    expected = PICTURE * share + 255 * (1 - share)
    assert np.abs(pixels_of(file_of(image)) - expected).max() <= 1


def test_transparent_colour_of_a_palette_is_white() -> None:
    image = Image.new("P", (8, 8), 1)
    image.putpalette([0, 0, 0, 10, 20, 30])
    image.putpixel((2, 3), 0)
    pixels = pixels_of(file_of(image, transparency=0))
    assert pixels[3, 2].tolist() == [255, 255, 255] and pixels[0, 0].tolist() == [10, 20, 30]


def test_sixteen_bits_of_grey_keep_their_brightness() -> None:
    values = np.linspace(0, 65_535, 256).astype(np.uint16).reshape(16, 16)
    pixels = pixels_of(file_of(Image.fromarray(values)))
    assert np.abs(pixels[:, :, 0] - values / 257).max() <= 1
    assert (pixels == pixels[:, :, :1]).all()


def test_black_and_white_and_print_colours_become_rgb() -> None:
    black = Image.new("1", (9, 9))
    assert pixels_of(file_of(black)).tolist() == np.zeros((9, 9, 3), int).tolist()
    white = Image.new("CMYK", (9, 9), (0, 0, 0, 0))
    assert pixels_of(file_of(white, "JPEG")).min() >= 250


def test_camera_file_of_several_pictures_is_its_first_one() -> None:
    first, second = (Image.new("RGB", (32, 32), colour) for colour in ("red", "blue"))
    pixels = pixels_of(file_of(first, "MPO", save_all=True, append_images=[second]))
    assert pixels[5, 5, 0] > 200 and pixels[5, 5, 2] < 50


@pytest.fixture
async def decoder() -> AsyncIterator[ImageDecoder]:
    decoder = ImageDecoder(SIZING, DecodeLimits(30.0), 1)
    yield decoder
    await decoder.close()


async def test_decoder_returns_pixels_of_the_models_size(decoder: ImageDecoder) -> None:
    pixels = await decoder.decode(file_of(noise(64, 96)), "auto")
    assert np.array_equal(pixels, noise(64, 96))
    assert (await decoder.decode(file_of(noise(65, 100)), "auto")).shape == (64, 96, 3)


async def test_bad_images_leave_the_worker_as_it_was(decoder: ImageDecoder) -> None:
    for data, message in BAD.values():
        with pytest.raises(ImageError, match=message):
            await decoder.decode(data, "auto")
    assert (await decoder.decode(file_of(noise(64, 64)), "low")).shape == (64, 64, 3)


async def test_killed_worker_gets_a_successor(decoder: ImageDecoder) -> None:
    await decoder.decode(file_of(PICTURE), "auto")
    process = decoder._workers._all[0]._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    assert (await decoder.decode(file_of(noise(64, 64)), "auto")).shape == (64, 64, 3)


async def test_decoding_that_takes_too_long_is_ended() -> None:
    decoder = ImageDecoder(SIZING, DecodeLimits(0.0001), 1)
    with pytest.raises(ImageError, match=r"takes more than 0\.0001 s or too much memory"):
        await decoder.decode(file_of(noise(1500, 1500), compress_level=1), "auto")
    await decoder.close()


URLS = {
    "no comma": ("data:image/png;base64", "reads data:image/png;base64"),
    "no base64": ("data:image/png,AAAA", "reads data:image/png;base64"),
    "wrong text": ("data:image/png;base64,A?==", "no valid base64"),
    "cut text": ("data:image/png;base64,AAAAA", "no valid base64"),
    "nothing": ("data:image/png;base64,", "no bytes"),
    "media type": ("data:text/html;base64,AAAA", "media type must be one of image/png.*text/html"),
    "too large": (url_of(b"x" * 101), "more than the 100 bytes"),
}


@pytest.mark.parametrize("name", URLS)
def test_wrong_data_url_is_refused(name: str) -> None:
    url, message = URLS[name]
    with pytest.raises(ImageError, match=message):
        data_of(url, 100)


def test_data_url_of_the_largest_size_is_read() -> None:
    data = bytes(range(100))
    assert data_of(url_of(data, "image/jpeg"), 100) == data
    assert data_of("DATA:Image/PNG;charset=x;BASE64," + url_of(data).partition(",")[2], 100) == data


def test_reply_holds_nothing_but_its_own_image() -> None:
    reply = answer(b"auto\n" + file_of(noise(32, 64)), SIZING, MANY)
    head, _, body = reply.partition(b"\n")
    assert head == b'{"height": 32, "width": 64}' and len(body) == 32 * 64 * 3
    assert Image.open(io.BytesIO(file_of(noise(32, 64)))).tobytes() == body
