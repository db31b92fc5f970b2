"""The process that decodes images, so that no image can hurt more than its own request.

Requests are a detail ("auto", "low", "high"), a newline and the bytes of the file. A reply is one
line of JSON, {"height", "width"} or {"error"}, and then the pixels: uint8 [height, width, 3], RGB.
Run by `images.decode`.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from services.common.worker_process import answer_requests, arguments
from services.tokenizer.images.deepseek import DeepSeekV4Sizing, DeepSeekV41Sizing
from services.tokenizer.images.errors import ImageError
from services.tokenizer.images.sizing import (
    Fit,
    Frame,
    ImageSizeError,
    Sizing,
    SmartResize,
    TokenBudget,
    framed,
)

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
# A JPEG file of several pictures (MPO, as many cameras write it) is read as its first one.
_ANIMATED = ("PNG", "WEBP", "GIF")
_GREY = (127, 127, 127)
_BICUBIC = Image.Resampling.BICUBIC
_SIZINGS: Mapping[str, type[Sizing]] = MappingProxyType(
    {
        kind.__name__: kind
        for kind in (SmartResize, TokenBudget, DeepSeekV4Sizing, DeepSeekV41Sizing)
    }
)


def decoded(data: bytes, max_pixels: int) -> Image.Image:
    """Return the picture of a file, upright, as RGB. Raises ImageError.

    Orientation follows EXIF. Transparent pictures are put on white.
    """
    image = _opened(data)
    width, height = image.size
    if width * height > max_pixels:
        raise ImageError(
            f"the image has {width} x {height} pixels, more than the {max_pixels} that are allowed"
        )
    if image.format in _ANIMATED and getattr(image, "is_animated", False):
        raise ImageError("the image is animated; only still images are taken")
    try:
        image.load()
        return _rgb(ImageOps.exif_transpose(image))
    except MemoryError:
        raise ImageError("the image needs too much memory") from None
    except Exception as error:  # decoders raise whatever the broken bytes lead them to
        raise ImageError("the image is corrupt or cut off") from error


def _opened(data: bytes) -> Image.Image:
    Image.MAX_IMAGE_PIXELS = None  # the limit of `decoded` counts, with a message of its own
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise ImageError("the image is corrupt or no PNG, JPEG, WebP or GIF file") from None
    except Exception as error:  # as above, from the header alone
        raise ImageError("the image is corrupt or cut off") from error


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits of grey
        return image.convert("I").point(lambda value: value * (1 / 257)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    page = Image.new("RGBA", image.size, "white")
    page.alpha_composite(image.convert("RGBA"))
    return page.convert("RGB")


def fitted(image: Image.Image, frame: Frame) -> Image.Image:
    """Return the picture on its canvas, resized bicubically."""
    size = (frame.width, frame.height)
    match frame.fit:
        case Fit.STRETCH:
            return image.resize(size, _BICUBIC)
        case Fit.CENTRE:
            return ImageOps.pad(image, size, _BICUBIC, color=_GREY)
        case Fit.CORNER:
            content = image.resize((frame.content_width, frame.content_height), _BICUBIC)
            canvas = Image.new("RGB", size)
            canvas.paste(content)
            return canvas


def answer(request: bytes, sizing: Sizing, max_pixels: int) -> bytes:
    """Return the reply to one request. Whatever is wrong with an image is a reply."""
    detail, _, data = request.partition(b"\n")
    try:
        image = decoded(data, max_pixels)
        frame = framed(sizing, image.height, image.width, detail.decode())
        image = fitted(image, frame)
    except ImageError as error:
        return _head(error=str(error))
    except ImageSizeError as error:
        return _head(error=f"the image {error}")
    except MemoryError:
        return _head(error="the image needs too much memory")
    return _head(height=image.height, width=image.width) + image.tobytes()


def _head(**fields: Any) -> bytes:
    return json.dumps(fields).encode() + b"\n"


def sizing_from(text: str) -> Sizing:
    """Return the sizing of a flag: JSON object of its class name and its fields."""
    fields = json.loads(text)
    return _SIZINGS[fields.pop("kind")](**fields)


def main() -> None:
    """Answer requests until the input ends."""
    parser = arguments()
    parser.add_argument("--max-pixels", type=int, required=True)
    parser.add_argument("--sizing", type=sizing_from, required=True)
    given = parser.parse_args()

    def reply(request: bytes) -> bytes:
        return answer(request, given.sizing, given.max_pixels)

    answer_requests(reply, given.seconds, given.memory_bytes)


if __name__ == "__main__":
    main()
