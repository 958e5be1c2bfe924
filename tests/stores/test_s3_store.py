"""A store on a real S3 server: parts of uploads, what is asked for, answers that get lost, servers that know less."""

from __future__ import annotations

import logging
import os
import pickle
import signal
from typing import Any
from uuid import uuid4

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast._base.tuning import (
    MIB,
    REMOTE_BUFFERED_BYTES,
    REMOTE_READ_BYTES,
    REMOTE_START_BYTES,
    UPLOADS,
    WRITE_BUFFER_BYTES,
)
from holdfast._stores.fsspec_store import FsspecStore
from holdfast._stores.s3_upload import S3Upload
from holdfast.errors import CommitConflictError
from tests import s3_server
from tests.s3_server import Bucket
from tests.stores.s3_requests import Requests, refusal

pytestmark = pytest.mark.skipif(bool(s3_server.MISSING), reason=s3_server.WHY_SKIPPED)


@pytest.fixture(scope="module")
def bucket() -> Bucket:
    return s3_server.new_bucket()


@pytest.fixture
def url(bucket: Bucket) -> str:
    return bucket.url("runs", uuid4().hex)


@pytest.fixture
def store(bucket: Bucket, url: str) -> FsspecStore:
    return FsspecStore(url, **bucket.options)


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    return Requests(monkeypatch)


def content_of(nbytes: int) -> bytes:
    return (bytes(range(251)) * (nbytes // 251 + 1))[:nbytes]


# --- uploads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbytes", "announced", "parts"),
    [
        (0, True, 0),
        (1, True, 0),
        (WRITE_BUFFER_BYTES, True, 0),  # one request does it
        (WRITE_BUFFER_BYTES, False, 1),  # nobody knew
        (WRITE_BUFFER_BYTES + 1, True, 2),
        (2 * WRITE_BUFFER_BYTES + MIB, False, 3),
    ],
)
def test_an_object_is_one_request_or_several_parts(store, bucket, requests, nbytes, announced, parts):
    content = content_of(nbytes)
    with store.create("data", nbytes if announced else None) as sink:
        for at in range(0, nbytes, 999_999):
            sink.write(content[at : at + 999_999])
    assert requests.count("UploadPart") == parts
    assert requests.count("PutObject") == (parts == 0)
    assert store.read("data") == content
    assert bucket.unfinished_uploads() == []


@pytest.mark.parametrize(
    ("memory", "part", "uploads"),
    [
        (None, WRITE_BUFFER_BYTES, UPLOADS),
        (32 * MIB, WRITE_BUFFER_BYTES, 3),
        (16 * MIB, WRITE_BUFFER_BYTES, 1),
        (8 * MIB, WRITE_BUFFER_BYTES, 0),
        (6 * MIB, 6 * MIB, 0),
        (1, 5 * MIB, 0),  # S3 takes none that are smaller
    ],
)
def test_parts_take_no_more_memory_than_they_may(bucket, memory, part, uploads):
    upload = S3Upload(bucket.client(), {}, "s3://somewhere", 100 * WRITE_BUFFER_BYTES, memory)
    assert upload.buffer().nbytes == part
    assert upload._uploads == uploads


@pytest.mark.parametrize("expected", [10_000 * WRITE_BUFFER_BYTES, 10_000 * WRITE_BUFFER_BYTES + 1, 5 << 40])
def test_the_largest_objects_have_few_enough_parts(bucket, expected):
    upload = S3Upload(bucket.client(), {}, "s3://somewhere", expected)
    assert -(-expected // upload._part_bytes) <= 10_000


def test_no_more_parts_are_in_memory_than_one_and_those_under_way(store, monkeypatch):
    made: list[int] = []
    real = S3Upload._next_buffer

    def counting(upload: S3Upload) -> bytearray:
        buffer = real(upload)
        made.append(id(buffer))
        assert len(upload._under_way) <= UPLOADS
        return buffer

    monkeypatch.setattr(S3Upload, "_next_buffer", counting)
    with store.create("data", 8 * WRITE_BUFFER_BYTES) as sink:
        for _ in range(8):
            sink.write(bytes(WRITE_BUFFER_BYTES))
    assert len(made) == 8
    assert len(set(made)) <= UPLOADS + 1


def test_an_object_is_not_there_before_it_is_complete(store, bucket):
    with store.create("data", 3 * WRITE_BUFFER_BYTES) as sink:
        sink.write(bytes(2 * WRITE_BUFFER_BYTES))
        assert store.size("data") is None
        assert store.list() == []
        assert len(bucket.unfinished_uploads()) == 1
        sink.write(bytes(WRITE_BUFFER_BYTES))
    assert store.size("data") == 3 * WRITE_BUFFER_BYTES
    assert bucket.unfinished_uploads() == []


@pytest.mark.parametrize("fails", ["CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload", "PutObject"])
def test_an_upload_that_fails_leaves_nothing(store, bucket, requests, fails):
    def fail(method: str, arguments: dict[str, Any]) -> None:
        if method == fails:
            raise refusal("AccessDenied")

    requests.before = fail
    content = b"small" if fails == "PutObject" else bytes(2 * WRITE_BUFFER_BYTES)
    with pytest.raises(PermissionError, match=r"data.*no"):
        store.put("data", content)
    assert store.list() == []
    assert bucket.unfinished_uploads() == []
    requests.before = lambda method, arguments: None
    store.put("data", content)
    assert store.read("data") == content


@pytest.mark.parametrize("nbytes", [10, 2 * WRITE_BUFFER_BYTES])
def test_a_name_that_is_taken_meanwhile_is_refused_and_stays(store, bucket, nbytes):
    def write_too() -> None:
        with store.create("data", nbytes) as sink:
            sink.write(bytes(nbytes))
            bucket.client().pipe_file(f"{store.location.removeprefix('s3://')}/data", b"theirs")

    with pytest.raises(FileExistsError, match="data"):
        write_too()
    assert store.read("data") == b"theirs"
    assert bucket.unfinished_uploads() == []


@pytest.mark.parametrize("nbytes", [10, 2 * WRITE_BUFFER_BYTES])
def test_the_answer_to_the_last_request_may_be_lost(store, bucket, requests, nbytes):
    """It is sent again then, and refused, since the object is there: it is ours."""
    lost = []

    def lose(method: str, arguments: dict[str, Any]) -> None:
        if method in ("PutObject", "CompleteMultipartUpload") and not lost:
            lost.append(method)
            raise TimeoutError("the answer did not come")  # s3fs tries again

    requests.after = lose
    store.put("data", content_of(nbytes))
    assert lost
    assert store.read("data") == content_of(nbytes)
    assert bucket.unfinished_uploads() == []


# --- reading -----------------------------------------------------------------------------------------------------


def test_a_small_object_is_read_with_one_request(store, requests):
    store.commit("record", b"content", replaces=None)
    requests.made.clear()
    assert store.read("record") == b"content"
    assert [method for method, _ in requests.made] == ["GetObject"]


def test_only_what_is_wanted_is_read(store, requests):
    content = content_of(3 * MIB)
    store.put("data", content)
    requests.made.clear()
    memory = bytearray(1000)
    with store.reader("data") as reader:
        reader.read_into(2 * MIB, memory)
        reader.read_into(10, memoryview(memory)[:10])
    assert bytes(memory[10:]) == content[2 * MIB + 10 : 2 * MIB + 1000]
    assert bytes(memory[:10]) == content[10:20]
    assert requests.ranges() == [(0, REMOTE_START_BYTES - 1), (2 * MIB, 2 * MIB + 999)]


def test_large_reads_are_several_requests_at_once(store, requests):
    content = content_of(2 * REMOTE_READ_BYTES + 1)
    store.put("data", content)
    requests.made.clear()
    assert store.read("data") == content
    assert len(requests.ranges()) == 1 + 3


def test_a_load_asks_for_large_ranges_and_opens_each_file_once(store, requests):
    """Tensors lie side by side, and their edges share blocks, but they are no requests of their own."""
    state = {f"w{number}": torch.full((900_000,), float(number)) for number in range(5)}  # 18 MB
    state["large"] = torch.arange(5_000_000.0)
    holdfast.save(state, store)
    requests.made.clear()
    loaded = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    holdfast.load(loaded, store)
    assert all(torch.equal(loaded[key], tensor) for key, tensor in state.items())
    (data,) = [listed for listed in store.list() if listed.name.startswith("data-")]
    ranges = requests.ranges(data.name)
    assert [part for part in ranges if part[0] == 0 and part[1] < REMOTE_START_BYTES] == [(0, REMOTE_START_BYTES - 1)]
    assert len(ranges) <= 2 + -(-data.size // REMOTE_BUFFERED_BYTES)  # the table is one


def test_a_load_with_little_memory_reads_small_things_in_small_ranges(store, requests):
    state = {f"w{number}": torch.full((50_000,), float(number)) for number in range(20)}
    holdfast.save(state, store)
    requests.made.clear()
    loaded = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    holdfast.load(loaded, store, memory_budget=1 << 20)
    assert all(torch.equal(loaded[key], tensor) for key, tensor in state.items())
    assert max(last - first + 1 for first, last in requests.ranges("-0-0.safetensors")) <= 1 << 19


def test_a_connection_that_breaks_is_made_again(store, monkeypatch):
    from holdfast._stores import s3_folder

    content = content_of(MIB)
    store.put("data", content)
    real, broken = s3_folder._fill, []

    async def break_off(memory: memoryview, body: Any) -> bool:
        """Twice for the first request, and twice for the range that follows it."""
        if broken.count(memory.nbytes) < 2:
            broken.append(memory.nbytes)
            memory[:10] = b"0123456789"
            body.close()
            return False
        return await real(memory, body)

    monkeypatch.setattr(s3_folder, "_fill", break_off)
    assert store.read("data") == content
    assert broken == [REMOTE_START_BYTES] * 2 + [MIB] * 2


def test_a_connection_that_always_breaks_is_an_error(store, monkeypatch):
    from holdfast._stores import s3_folder

    store.put("data", b"content")

    async def break_off(memory: memoryview, body: Any) -> bool:
        body.close()
        return False

    monkeypatch.setattr(s3_folder, "_fill", break_off)
    with pytest.raises(OSError, match=r"broke.*data"):
        store.read("data")


@pytest.mark.parametrize("change", ["replaced", "deleted"])
def test_a_range_of_an_object_that_has_changed_is_refused(store, change):
    store.commit("record", content_of(MIB), replaces=None)
    with store.reader("record") as reader:
        if change == "replaced":
            store.commit("record", content_of(MIB)[::-1], replaces=content_of(MIB))
        else:
            store.delete(["record"])
        memory = bytearray(10)
        with pytest.raises(OSError, match=r"was replaced while it was read.*record"):
            reader.read_into(MIB - 10, memory)
        assert memory == bytes(10)


# --- commits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", [None, b"old", b"x" * (2 * REMOTE_START_BYTES)], ids=["none", "small", "large"])
def test_what_changes_between_the_look_and_the_put_is_a_conflict(store, bucket, requests, old):
    if old is not None:
        store.commit("record", old, replaces=None)
    other = bucket.plain_client()
    others = []

    def be_faster(method: str, arguments: dict[str, Any]) -> None:
        if method == "PutObject" and not others:
            others.append(other.put_object(Bucket=arguments["Bucket"], Key=arguments["Key"], Body=b"theirs"))

    requests.before = be_faster
    with pytest.raises(CommitConflictError, match="record"):
        store.commit("record", b"mine", replaces=old)
    assert store.read("record") == b"theirs"


@pytest.mark.parametrize("old", [None, b"old"])
def test_a_commit_whose_answer_is_lost_is_found_to_be_ours(store, requests, old):
    if old is not None:
        store.commit("record", old, replaces=None)
    lost = []

    def lose(method: str, arguments: dict[str, Any]) -> None:
        if method == "PutObject" and not lost:
            lost.append(method)
            raise TimeoutError("the answer did not come")

    requests.after = lose
    store.commit("record", b"mine", replaces=old)
    assert lost
    assert store.read("record") == b"mine"


def test_a_server_that_is_busy_with_another_put_is_asked_again(store, requests):
    refused = []

    def refuse(method: str, arguments: dict[str, Any]) -> None:
        if method == "PutObject" and len(refused) < 2:
            refused.append(method)
            raise refusal("ConditionalRequestConflict")

    requests.before = refuse
    store.commit("record", b"mine", replaces=None)
    assert len(refused) == 2
    assert store.read("record") == b"mine"


@pytest.mark.parametrize("old", [None, b"old"])
def test_a_server_without_conditions_is_asked_without_and_logged(store, requests, caplog, old):
    def refuse(method: str, arguments: dict[str, Any]) -> None:
        if "IfNoneMatch" in arguments or (method == "PutObject" and "IfMatch" in arguments):
            raise refusal("NotImplemented")

    requests.before = refuse
    with caplog.at_level(logging.WARNING, "holdfast.stores"):
        if old is not None:
            store.commit("record", old, replaces=None)
        store.commit("record", b"mine", replaces=old)
        store.put("data", bytes(2 * WRITE_BUFFER_BYTES))
    assert "no conditional puts" in caplog.text
    assert (store.read("record"), store.size("data")) == (b"mine", 2 * WRITE_BUFFER_BYTES)
    with pytest.raises(CommitConflictError):
        store.commit("record", b"other", replaces=b"something else")
    with pytest.raises(FileExistsError):
        store.put("data", b"other")


ROUNDS = 5


def commit_with_others(bucket: Bucket, url: str) -> list[bool]:
    store, won = FsspecStore(url, **bucket.options), []
    for number in range(ROUNDS):
        dist.barrier()
        try:
            mine, before = b"%d of %d" % (number, dist.get_rank()), _before(store, number)
            store.commit(f"record-{number // 2}", mine, replaces=before)
            won.append(True)
        except CommitConflictError:
            won.append(False)
        dist.barrier()
    return won


def _before(store: FsspecStore, number: int) -> bytes | None:
    """Every other round replaces what the one before has left."""
    before = store.read(f"record-{number // 2}") if number % 2 else None
    dist.barrier()
    return before


def test_of_processes_that_commit_at_once_one_wins(ranks, bucket, url):
    results = ranks(3).run(commit_with_others, bucket, url)
    assert [sum(won) for won in zip(*results, strict=True)] == [1] * ROUNDS


# --- places and errors -------------------------------------------------------------------------------------------


def test_a_bucket_that_does_not_exist_is_never_made(bucket):
    store = FsspecStore(f"s3://none-{uuid4().hex}/run", **bucket.options)
    assert store.size("data") is None
    for act in (
        store.list,
        lambda: store.put("data", b"1"),
        lambda: store.commit("record", b"1", replaces=None),
        lambda: store.put("data", bytes(2 * WRITE_BUFFER_BYTES)),
    ):
        with pytest.raises(FileNotFoundError, match="none-"):
            act()
    assert not bucket.client().exists(store.location)


def test_a_server_that_cannot_be_reached_is_an_os_error():
    config = {"retries": {"max_attempts": 0}, "connect_timeout": 1}
    store = FsspecStore("s3://b/run", endpoint_url="http://127.0.0.1:9", key="k", secret="s", config_kwargs=config)
    store.files.fs.retries = 1
    for act in (store.list, lambda: store.size("data"), lambda: store.read("data"), lambda: store.delete(["a", "b"])):
        with pytest.raises(OSError, match=r"s3://b/run"):
            act()


def test_a_store_can_be_sent_to_another_process(store):
    store.put("data", b"content")
    copy = pickle.loads(pickle.dumps(store))
    assert copy.location == store.location
    assert copy.read("data") == b"content"


def upload_and_die(bucket: Bucket, url: str) -> None:
    with FsspecStore(url, **bucket.options).create("data", 3 * WRITE_BUFFER_BYTES) as sink:
        sink.write(bytes(2 * WRITE_BUFFER_BYTES))
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_kill_in_the_middle_of_an_upload_leaves_no_object(ranks, bucket, url, store):
    (outcome,) = ranks(1).run_raw(upload_and_die, bucket, url)
    assert outcome.error.type_name == "RankDied"
    assert store.list() == []
    store.put("data", b"again")
    assert store.read("data") == b"again"


def test_a_bucket_that_is_not_there_is_reported_and_not_taken_for_an_empty_folder(bucket, store):
    assert store.list() == []
    nowhere = FsspecStore("s3://no-such-bucket-anywhere/run", **bucket.options)
    with pytest.raises(FileNotFoundError, match="there is no such bucket: 's3://no-such-bucket-anywhere/run'"):
        nowhere.list()
    with pytest.raises(FileNotFoundError, match="there is no such bucket: 's3://no-such-bucket-anywhere/run'"):
        holdfast.open(nowhere)


def test_a_url_without_a_bucket_is_refused(bucket):
    with pytest.raises(ValueError, match=r"s3:// names no bucket; write it like s3://bucket/folder"):
        FsspecStore("s3://", **bucket.options)
