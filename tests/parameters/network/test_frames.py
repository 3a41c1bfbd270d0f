"""Frames, their bodies and their seals, without any network."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stratagem.cluster import token as tokens
from stratagem.errors import ParameterError, ProtocolError
from stratagem.parameters.network import bodies, compression, frames, tensor_streams
from stratagem.parameters.network.compression import Compression, Encoder
from stratagem.parameters.network.encryption import FrameOpener, Handshake, Sealer
from stratagem.parameters.network.frames import CHUNK_BYTES, HEADER_BYTES, FrameKind
from stratagem.parameters.network.tensor_streams import Inflow
from stratagem.parameters.partitioning import make_plan
from stratagem.parameters.protocol import OptimizerSpec, Piece, Rows, Variable

KEY = b"k" * 32
TENSORS = [torch.randn(700, 500), torch.randn(3), torch.tensor(2.5), torch.empty(0), torch.arange(300_000)]


def received(tensors: list[torch.Tensor], rooms: list[torch.Tensor]) -> Inflow:
    sealer, opener, inflow = Sealer(KEY), FrameOpener(KEY), Inflow(rooms)
    for offset, piece in tensor_streams.pieces(tensors):
        frame = sealer.seal(FrameKind.DATA, piece, offset=offset)
        inflow.take(opener, frame, opener.parse(frame))
    return inflow


def test_stream_brings_tensors_of_all_sizes_in_few_frames() -> None:
    rooms = [torch.empty_like(each) for each in TENSORS]
    assert received(TENSORS, rooms).is_complete
    assert all(torch.equal(one, other) for one, other in zip(TENSORS, rooms, strict=True))
    assert all(len(piece) <= CHUNK_BYTES for _, piece in tensor_streams.pieces(TENSORS))
    small = [torch.ones(4)] * 100
    assert len(list(tensor_streams.pieces(small))) == 1


def test_stream_scatters_a_frame_over_tensors_of_other_sizes() -> None:
    whole = torch.arange(10, dtype=torch.float32)
    rooms = [torch.empty(3), torch.empty(0), torch.empty(7)]
    assert received([whole], rooms).is_complete
    assert torch.equal(torch.cat(rooms), whole)


@pytest.mark.parametrize("rooms", [[torch.empty(2)], [], [torch.empty(1), torch.empty(1)]])
def test_stream_refuses_more_than_the_receiver_has_room_for(rooms: list[torch.Tensor]) -> None:
    with pytest.raises(ProtocolError, match="12 bytes came"):
        received([torch.ones(3)], rooms)


def test_stream_refuses_bytes_that_are_not_the_next() -> None:
    sealer, opener, inflow = Sealer(KEY), FrameOpener(KEY), Inflow([torch.empty(8)])
    frame = sealer.seal(FrameKind.DATA, bytes(8), offset=8)
    with pytest.raises(ProtocolError, match="byte 8 of a stream that is at 0"):
        inflow.take(opener, frame, opener.parse(frame))


def test_every_changed_byte_and_every_shorter_frame_is_refused() -> None:  # A3
    frame = bytes(
        Sealer(KEY).seal(FrameKind.PULL, bodies.encode(FrameKind.PULL, {"names": None, "rows": []}), request=7)
    )

    def is_refused(changed: bytes) -> bool:
        opener = FrameOpener(KEY)
        try:
            header = opener.parse(changed)
            opener.open(changed, header)
        except ProtocolError:
            return True
        return False

    assert not is_refused(bytes(frame))
    for place in range(len(frame)):
        changed = bytearray(frame)
        changed[place] ^= 1
        assert is_refused(bytes(changed)), place
        assert is_refused(bytes(frame[:place])), place
    assert is_refused(bytes(frame) + b"\0")


def test_frames_open_once_in_order_and_in_their_direction_only() -> None:  # A2
    handshake = Handshake(tokens.Token(b"s" * 32, __import__("pathlib").Path("x")), bytes(32), bytes(32))
    up, down = handshake.keys()
    sealer, opener = Sealer(up), FrameOpener(up)
    first, second = (bytes(sealer.seal(FrameKind.BEAT, b"{}")) for _ in range(2))
    with pytest.raises(ProtocolError, match="frame 1 came, 0 was to come"):
        opener.parse(second)
    opener.open(first, opener.parse(first))
    with pytest.raises(ProtocolError, match="frame 0 came, 1 was to come"):
        opener.parse(first)
    other = FrameOpener(down)
    with pytest.raises(ProtocolError, match="comes from somebody else"):
        other.open(first, other.parse(first))


@given(st.binary(max_size=200))
def test_parser_refuses_noise_and_nothing_else_happens(noise: bytes) -> None:  # A6
    for parse in (frames.parse, frames.parse_greeting):
        with pytest.raises(ProtocolError):
            parse(noise)


@given(
    st.integers(0, 255),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 100),
)
def test_parser_believes_no_size_that_it_does_not_see(
    kind: int, request: int, offset: int, length: int, real: int
) -> None:  # A4
    frame = frames._HEADER.pack(b"SGPS", 1, kind, 0, 0, request, offset, length) + bytes(real + frames.SEAL_BYTES)
    try:
        header = frames.parse(frame)
    except ProtocolError:
        return
    assert header.length == real == length
    assert header.offset <= frames.MOST_SHARD_BYTES


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(list(FrameKind)), st.data())
def test_bodies_refuse_whatever_is_not_theirs(kind: FrameKind, data: st.DataObject) -> None:  # A6
    fields = list(bodies._FIELDS.get(kind, {}))
    body = data.draw(st.fixed_dictionaries(dict.fromkeys(fields, JSON)) | JSON)
    encoded = data.draw(st.sampled_from([json.dumps(body).encode(), b"\xff" + json.dumps(body).encode(), b"[" * 2000]))
    try:
        found = bodies.decode(kind, encoded)
        if kind == FrameKind.DEFINE:
            bodies.plan_from_body(found)
    except ProtocolError:
        return
    assert list(found) == fields or set(found) == set(fields)


@pytest.mark.parametrize(
    "change",
    [
        {"shard": 9},
        {"variables": [["a", [2**40, 2**40], "float32", False, True]]},
        {"variables": [["a", [2], "object", False, True]]},
        {"variables": [["a", [2.0], "float32", False, True]]},
        {"variables": [["a", [-2], "float32", False, True]]},
        {"shards": [[[5, 0, 1]]]},
        {"shards": [[[0, 0, 9]]]},
        {"shards": [[[0, 0, 1], [0, 1, 2]]]},
        {"pacing": ["Async", [], [], [], 0]},
        {"pacing": ["Async", [], [1.0, -1.0], [], 60.0]},
        {"surprise": 1},
    ],
)
def test_plan_from_a_body_refuses_what_cannot_be(change: dict[str, object]) -> None:  # A6
    plan = make_plan([Variable("a", (2,), torch.float32)], 1)
    common = {"shard": 0, "optimizers": [], "pacing": ["Async", [], [], [], 60.0], "has_values": True, "is_open": True}
    body = {**bodies.plan_to_body(plan), **common}
    assert bodies.plan_from_body(bodies.decode(FrameKind.DEFINE, bodies.encode(FrameKind.DEFINE, body))) == plan
    with pytest.raises(ProtocolError):
        bodies.plan_from_body(bodies.decode(FrameKind.DEFINE, json.dumps({**body, **change}).encode()))


def test_body_with_a_name_twice_is_refused() -> None:  # A6
    with pytest.raises(ProtocolError, match="not valid JSON"):
        bodies.decode(FrameKind.FENCED, b'{"why": "a", "why": "b"}')


def test_optimizer_travels_without_code() -> None:
    spec = OptimizerSpec("Adam", ((("a", "b"), {"lr": 0.1, "betas": (0.9, 0.99), "fused": None}),))
    assert bodies.optimizer_from_body(json.loads(json.dumps(bodies.optimizer_to_body(spec)))) == spec


def test_too_many_variables_are_refused_where_they_are_named() -> None:
    plan = make_plan([Variable(f"{number}{'x' * 2000}", (1,), torch.float32) for number in range(600)], 1)
    common = {"shard": 0, "optimizers": [], "pacing": ["Async", [], [], [], 60.0], "has_values": True, "is_open": True}
    with pytest.raises(ParameterError, match="fewer variables"):
        bodies.encode(FrameKind.DEFINE, {**bodies.plan_to_body(plan), **common})


def test_frame_of_the_largest_chunk_is_within_the_limit() -> None:
    frame = bytes(Sealer(KEY).seal(FrameKind.DATA, bytes(frames.MOST_PAYLOAD_BYTES)))
    assert len(frame) == frames.MOST_FRAME_BYTES
    assert frames.parse(frame).length == frames.MOST_PAYLOAD_BYTES
    with pytest.raises(ProtocolError, match="bytes, got"):
        frames.parse(bytes(frame) + bytes(1))
    assert HEADER_BYTES == 36


# Compression


def sent(encoder: Encoder, piece: Piece, gradient: torch.Tensor) -> tuple[torch.Tensor, int]:
    count, encoding, tensors = encoder.encode(piece, gradient)
    rooms = compression.rooms(piece, count, encoding)
    assert [each.shape for each in rooms] == [each.shape for each in tensors]
    assert [each.dtype for each in rooms] == [each.dtype for each in tensors]
    decoded = compression.decoded(piece, count, encoding, iter(tensors))
    assert isinstance(decoded, torch.Tensor)
    return decoded, sum(each.nbytes for each in tensors)


def test_bf16_halves_a_gradient_and_keeps_it_close() -> None:
    piece = Piece(Variable("a", (64, 64), torch.float32), 0, 64)
    gradient = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    decoded, num_bytes = sent(Encoder(Compression("bf16")), piece, gradient)
    assert num_bytes == gradient.nbytes / 2
    torch.testing.assert_close(decoded, gradient, rtol=2**-8, atol=0)


def test_top_k_delays_what_it_leaves_out_and_loses_nothing() -> None:
    piece = Piece(Variable("a", (2000,), torch.float32), 0, 2000)
    generator = torch.Generator().manual_seed(1)
    encoder = Encoder(Compression("topk", fraction=0.05))
    gradients = [torch.randn(2000, generator=generator) for _ in range(30)]
    total = torch.zeros(2000)
    for gradient in gradients:
        decoded, num_bytes = sent(encoder, piece, gradient)
        assert decoded.count_nonzero() == 100
        assert num_bytes == 100 * (8 + 4)
        total += decoded
    left_out = encoder._left_out["a", 0]
    torch.testing.assert_close(total + left_out, torch.stack(gradients).sum(0))


def test_compression_that_is_none_is_refused() -> None:
    with pytest.raises(ParameterError, match="'bf16' or 'topk', got 'zip'"):
        Compression("zip")
    with pytest.raises(ParameterError, match="fraction"):
        Compression("topk", fraction=0.0)


@pytest.mark.parametrize(("count", "encoding"), [(99, ""), (99, "topk"), (None, "topk"), (1, "bf16"), (1, "zip")])
def test_rooms_are_never_larger_than_the_piece(count: int | None, encoding: str) -> None:  # A4, A7
    piece = Piece(Variable("a", (3, 2), torch.float32), 0, 3)
    with pytest.raises(ProtocolError):
        compression.rooms(piece, count, encoding)


def test_rows_travel_as_rows() -> None:
    piece = Piece(Variable("a", (5, 2), torch.float32, sparse=True), 0, 5)
    rows = Rows(torch.tensor([1, 4]), torch.ones(2, 2))
    count, encoding, tensors = Encoder(Compression("bf16")).encode(piece, rows)
    decoded = compression.decoded(piece, count, encoding, iter(tensors))
    assert isinstance(decoded, Rows)
    assert torch.equal(decoded.indices, rows.indices)
