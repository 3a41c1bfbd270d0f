import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stratagem.devices import kind_table
from stratagem.devices.device_spec import DeviceSpec, parse_kind
from stratagem.errors import DeviceTypeError, UnknownDeviceError

indices = st.integers(0, 10**9 - 1) | st.none()
specs = st.builds(
    DeviceSpec,
    job=st.from_regex(r"[A-Za-z][A-Za-z0-9_-]{0,10}", fullmatch=True) | st.none(),
    replica=indices,
    task=indices,
    device_type=st.sampled_from(kind_table.names()) | st.none(),
    device_index=indices,
)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("cpu:1", "/device:CPU:1"),
        ("/cpu:1", "/device:CPU:1"),
        ("cuda:0", "/device:GPU:0"),
        ("cuda", "/device:GPU:*"),
        ("gpu:0", "/device:GPU:0"),
        ("GPU:0", "/device:GPU:0"),
        ("hip:2", "/device:GPU:2"),
        ("rocm:2", "/device:GPU:2"),
        ("xpu:1", "/device:XPU:1"),
        ("mps", "/device:MPS:*"),
        ("/device:GPU:0", "/device:GPU:0"),
        ("device:gpu:0", "/device:GPU:0"),
        ("/device:GPU:*", "/device:GPU:*"),
        ("/device:*:1", "/device:*:1"),
        ("/physical_device:GPU:3", "/device:GPU:3"),
        ("/job:worker", "/job:worker"),
        ("/job:worker/task:1", "/job:worker/task:1"),
        ("/job:worker/task:1/cpu:0", "/job:worker/task:1/device:CPU:0"),
        (
            "/job:worker/replica:0/task:1/device:GPU:0",
            "/job:worker/replica:0/task:1/device:GPU:0",
        ),
        ("/job:localhost/replica:0/task:0/cpu:0", "/job:localhost/replica:0/task:0/device:CPU:0"),
        (" gpu:0 ", "/device:GPU:0"),
        ("", ""),
        ("/", ""),
    ],
)
def test_spec_reads_every_spelling(text: str, canonical: str) -> None:
    assert DeviceSpec.from_string(text).to_string() == canonical


def test_spec_reads_what_torch_prints() -> None:
    assert DeviceSpec.from_string(str(torch.device("cuda:1"))) == DeviceSpec(device_type="GPU", device_index=1)


@given(specs)
def test_spec_survives_the_way_to_text_and_back(spec: DeviceSpec) -> None:
    assert DeviceSpec.from_string(spec.to_string()) == spec


@given(specs)
def test_spec_reads_the_same_in_any_case(spec: DeviceSpec) -> None:
    without_job = dataclasses.replace(spec, job=None)
    assert DeviceSpec.from_string(without_job.to_string().lower()) == without_job


@given(specs, specs)
def test_merging_takes_each_part_from_the_other_if_it_has_it(one: DeviceSpec, other: DeviceSpec) -> None:
    merged = one.make_merged_spec(other)
    for field in dataclasses.fields(DeviceSpec):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        assert getattr(merged, field.name) == (mine if theirs is None else theirs)


@given(specs, specs, specs)
def test_merging_is_associative(one: DeviceSpec, two: DeviceSpec, three: DeviceSpec) -> None:
    left = one.make_merged_spec(two).make_merged_spec(three)
    assert left == one.make_merged_spec(two.make_merged_spec(three))


@given(st.text(alphabet=st.sampled_from("/:*0123456789abcdeghijklmnopqrstuvwxyz_ 日-"), max_size=24))
def test_spec_refuses_any_other_text_with_its_own_error(text: str) -> None:
    try:
        spec = DeviceSpec.from_string(text)
    except UnknownDeviceError as error:
        assert repr(text) in str(error) or "job" in str(error)  # noqa: PT017  # either is right
    else:
        assert DeviceSpec.from_string(spec.to_string()) == spec


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpx:0", ["'gpx:0'", "cpu, gpu (also written cuda", "'gpu:0'", "Did you mean 'gpu:0'?"]),
        ("/device:CUDDA:0", ["'/device:CUDDA:0'", "Did you mean 'cuda:0'?"]),
        ("gpu1", ["'gpu1'", "Did you mean 'gpu:1'?"]),
        ("cdua:0", ["Did you mean 'cuda:0'?"]),
        ("banana", ["'banana'", "Known kinds"]),
        ("gpu:-1", ["'gpu:-1'", "'-1' is not an index", "from 0 up"]),
        ("gpu:one", ["'one' is not an index"]),
        ("gpu:1.5", ["'1.5' is not an index"]),
        ("gpu:" + "9" * 5000, ["is not an index"]),
        ("gpu:", ["'' is not an index"]),
        ("gpu:0:1", ["too many colons"]),
        ("//gpu:0", ["unknown device '//gpu:0'"]),
        ("/job:a/job:b", ["gives its job twice"]),
        ("/gpu:0/cpu:0", ["gives its device_type twice"]),
        ("/job:1a", ["job '1a' is not a name"]),
        ("/job:", ["job '' is not a name"]),
    ],
)
def test_spec_says_what_is_wrong_with_a_name(text: str, words: list[str]) -> None:
    with pytest.raises(UnknownDeviceError) as caught:
        DeviceSpec.from_string(text)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("value", [0, 1.5, True, None, ["gpu:0"]])
def test_spec_refuses_what_is_not_text(value: object) -> None:
    with pytest.raises(DeviceTypeError, match="a device name is a text such as 'gpu:0', got"):
        DeviceSpec.from_string(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("index", [-1, True, 1.0, "0", 10**9])
def test_spec_refuses_an_index_that_is_not_a_whole_number(index: object) -> None:
    with pytest.raises(UnknownDeviceError, match="device_index must be a whole number from 0 up, got"):
        DeviceSpec(device_type="GPU", device_index=index)  # type: ignore[arg-type]


def test_spec_takes_any_spelling_of_a_kind_in_its_constructor() -> None:
    assert DeviceSpec(device_type="cuda", device_index=0) == DeviceSpec.from_string("/device:GPU:0")


def test_kind_suggests_the_likeliest_when_unknown() -> None:
    with pytest.raises(
        UnknownDeviceError, match=r"unknown kind of device 'GPUU'\. Known kinds: .* Did you mean 'gpu'\?"
    ):
        parse_kind("GPUU")
    with pytest.raises(UnknownDeviceError, match="'GPU:0' is a device, not a kind; write 'GPU'"):
        parse_kind("GPU:0")
    with pytest.raises(DeviceTypeError, match="such as 'GPU', got 3"):
        parse_kind(3)  # type: ignore[arg-type]
