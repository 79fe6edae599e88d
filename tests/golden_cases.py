"""Fixed inputs of the golden images: what an Extent of format version 1 must look like, to the bit.

A version bump, and nothing else, is a reason to make the images anew:

    python -m tests.golden_cases

writes tests/golden/ (whole images of two small cases and of a superblock, sha256 of the others).
Keep the old folder as tests/golden_v1/ for as long as old stores must be recognised.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kvtier.io.device import ByteArray
from kvtier.io.superblock import DATA_START, Superblock
from kvtier.tiering import extent_format
from kvtier.tiering.chain import Tokens, as_tokens, chain_digest
from kvtier.tiering.extent_format import ExtentIdentity
from kvtier.tiering.geometry import Geometry, LayerGeometry
from kvtier.tiering.packing import TORCH_DTYPES, pack
from kvtier.tiering.page_layout import Order, PageLayout

FOLDER = Path(__file__).parent / "golden"
DIGESTS = FOLDER / "digests.json"
SUPERBLOCK = FOLDER / "superblock.bin"
STORE_UUID = bytes.fromhex("00112233445566778899aabbccddeeff")
FINGERPRINT = bytes(range(32))
IMAGE_BYTES_MAX = 64 * 1024


@dataclass(frozen=True, slots=True)
class Case:
    """One Segment of a small model; its Extents follow each other from DATA_START on."""

    name: str
    geometry: Geometry
    tokens: int
    start: int = 0
    provenance: str = "exact"
    clustered: bool = False
    whole_layer: int | None = None
    """The layer whose image is kept as a file."""

    @property
    def generation(self) -> int:
        return 0x0123456789ABCDEF ^ self.tokens

    @property
    def stream(self) -> Tokens:
        """Every token from position 0 to the Segment's end."""
        return as_tokens(
            (np.arange(self.start + self.tokens, dtype=np.int64) * 7919 + 11) % 151_936
        )

    def bits(self, layer: int, of_values: bool) -> torch.Tensor:
        """Keys or values [heads, tokens, width] whose bits are a fixed formula, NaNs included."""
        shape = self.geometry.layers[layer]
        width = shape.value_width if of_values else shape.key_width
        item = self.geometry.item_bytes
        index = np.arange(shape.kv_heads * self.tokens * width * item, dtype=np.uint64)
        mixed = (index + np.uint64(layer * 131 + of_values)) * np.uint64(2654435761)
        raw = ((mixed >> np.uint64(13)) & np.uint64(0xFF)).astype(np.uint8)
        dtype = TORCH_DTYPES[self.geometry.dtype]
        shown = torch.from_numpy(raw.reshape(shape.kv_heads, self.tokens, width * item))
        return shown.view(dtype) if width else shown.to(dtype)

    def order(self, layer: int) -> Order | None:
        """A permutation per head: a stride that shares no factor with the token count."""
        if not self.clustered:
            return None
        heads = self.geometry.layers[layer].kv_heads
        steps = [step for step in range(2, 4 * self.tokens) if np.gcd(step, self.tokens) == 1]
        places = np.arange(self.tokens, dtype=np.int64)
        return np.stack([(places * steps[head + 3] + head) % self.tokens for head in range(heads)])

    def device_offset(self, layer: int) -> int:
        before = range(layer)
        return DATA_START + sum(
            extent_format.extent_bytes(self.geometry, each, self.tokens) for each in before
        )

    def identity(self, layer: int) -> ExtentIdentity:
        return ExtentIdentity(
            store_uuid=STORE_UUID,
            fingerprint=FINGERPRINT,
            provenance=self.provenance,
            start_digest=chain_digest(self.stream[: self.start]),
            end_digest=chain_digest(self.stream),
            generation=self.generation,
            start_position=self.start,
            token_count=self.tokens,
            layer=layer,
            device_offset=self.device_offset(layer),
            extent_bytes=extent_format.extent_bytes(self.geometry, layer, self.tokens),
        )


def _uniform(heads: int, key: int, value: int, *, layers: int = 2) -> tuple[LayerGeometry, ...]:
    return (LayerGeometry(heads, key, value),) * layers


CASES = [
    Case("width64", Geometry(_uniform(2, 64, 64), "bfloat16"), 64),
    Case("width80", Geometry(_uniform(2, 80, 80), "float16"), 48, start=512),
    Case("width96", Geometry(_uniform(2, 96, 96), "float32"), 32),
    Case("width256", Geometry(_uniform(1, 256, 256), "bfloat16"), 16),
    Case("full_segment", Geometry(_uniform(1, 8, 8, layers=1), "bfloat16"), 512),
    Case("latent", Geometry(_uniform(1, 576, 0), "bfloat16"), 40),
    Case(
        "heads_differ",
        Geometry(tuple(LayerGeometry(heads, 16, 24) for heads in (3, 3, 4, 4, 5, 6)), "float16"),
        50,
    ),
    Case("window", Geometry((LayerGeometry(2, 32, 32, window=128),), "float32"), 20, start=1000),
    Case("short_page", Geometry(_uniform(2, 64, 64), "bfloat16"), 37, whole_layer=0),
    Case(
        "clustered",
        Geometry(_uniform(2, 20, 12), "bfloat16"),
        37,
        start=512,
        provenance="approximate:budget=0.125,codec=raw",
        clustered=True,
        whole_layer=1,
    ),
]


def payload_of(case: Case, layer: int) -> ByteArray:
    payload = np.zeros(case.geometry.payload_bytes(layer, case.tokens), np.uint8)
    pack(case.bits(layer, False), case.bits(layer, True), case.order(layer), payload)
    return payload


def image_of(case: Case, layer: int) -> bytes:
    """Header, directory, tokens, payload and padding, as they lie on the device."""
    identity = case.identity(layer)
    payload = payload_of(case, layer)
    shape = PageLayout(case.geometry.layers[layer], case.tokens, case.geometry.item_bytes)
    directory = shape.directory(case.order(layer))
    extent_format.checksum_pages(directory, payload, case.generation)
    image = np.zeros(identity.extent_bytes, np.uint8)
    head = extent_format.header_bytes(case.geometry, layer, case.tokens)
    whole = extent_format.checksum(payload, case.generation)
    tokens = case.stream[case.start :]
    extent_format.write_header(image[:head], identity, case.geometry, directory, whole, tokens)
    image[head : head + payload.size] = payload
    return image.tobytes()


def superblock() -> Superblock:
    return Superblock(
        store_uuid="00112233-4455-6677-8899-aabbccddeeff",
        created=1_700_000_000,
        region_bytes=4 << 30,
        block_bytes=512,
        sequence=3,
    )


def image_path(case: Case) -> Path:
    return FOLDER / f"extent_{case.name}_layer{case.whole_layer}.bin"


def write() -> None:
    """Make tests/golden/ anew."""
    FOLDER.mkdir(exist_ok=True)
    digests = {}
    for case in CASES:
        images = [image_of(case, layer) for layer in range(len(case.geometry.layers))]
        digests[case.name] = [hashlib.sha256(image).hexdigest() for image in images]
        if case.whole_layer is not None:
            assert len(images[case.whole_layer]) <= IMAGE_BYTES_MAX
            image_path(case).write_bytes(images[case.whole_layer])
    DIGESTS.write_text(json.dumps(digests, indent=2) + "\n")
    SUPERBLOCK.write_bytes(superblock().pack())


if __name__ == "__main__":
    write()
