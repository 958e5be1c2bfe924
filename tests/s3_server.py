"""A real S3-compatible server for tests: its own process, spoken to over HTTP."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

MISSING = [name for name in ("s3fs", "moto", "flask") if importlib.util.find_spec(name) is None]
WHY_SKIPPED = f"NO S3 TEST RUNS: {', '.join(MISSING)} not installed; pip install -e '.[dev]'"

_SERVE = """
import logging, sys, threading
from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer
one_at_a_time = threading.Lock()  # S3 compares and puts in one step, and this server would do it in two
put_object = S3Response.put_object
def put_in_one_step(self):
    with one_at_a_time:
        return put_object(self)
S3Response.put_object = put_in_one_step
logging.disable()
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()  # until the tests close it, or are gone
"""


@dataclass(frozen=True)
class Bucket:
    """A new bucket on the server."""

    name: str
    port: int

    @property
    def options(self) -> dict[str, Any]:
        """The storage options to reach it with."""
        return {"endpoint_url": f"http://127.0.0.1:{self.port}", "key": "tests", "secret": "tests"}

    @property
    def environment(self) -> dict[str, str]:
        """The same for programs that are given nothing but a URL."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": "tests",
        }

    @contextmanager
    def in_environment(self) -> Iterator[None]:
        """For a while, URLs lead to it."""
        before = {name: os.environ.get(name) for name in self.environment}
        os.environ.update(self.environment)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value

    def url(self, *parts: str) -> str:
        return "/".join([f"s3://{self.name}", *parts])

    def client(self) -> Any:
        """A file system of its own, which shares no cache with those under test."""
        import s3fs

        return s3fs.S3FileSystem(**self.options, skip_instance_cache=True, use_listings_cache=False)

    def plain_client(self) -> Any:
        """One of boto3, which needs no event loop."""
        import boto3

        access = {"aws_access_key_id": "tests", "aws_secret_access_key": "tests", "region_name": "us-east-1"}
        return boto3.client("s3", endpoint_url=self.options["endpoint_url"], **access)

    def names(self, folder: str) -> set[str]:
        """The objects in a folder."""
        return {path.rsplit("/", 1)[1] for path in self.client().find(f"{self.name}/{folder}")}

    def unfinished_uploads(self) -> list[str]:
        """Keys whose upload was begun, and neither completed nor aborted."""
        found = self.client().call_s3("list_multipart_uploads", Bucket=self.name)
        return [upload["Key"] for upload in found.get("Uploads", [])]


def new_bucket() -> Bucket:
    bucket = Bucket(f"tests-{uuid.uuid4().hex[:12]}", _port())
    bucket.client().mkdir(bucket.name)
    return bucket


@functools.cache
def _port() -> int:
    """Start the server, once."""
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )

    def stop() -> None:
        server.kill()
        server.wait()

    atexit.register(stop)
    assert server.stdout is not None
    line = server.stdout.readline()
    if not line.strip():
        raise RuntimeError("the S3 server did not start")
    return int(line)
