"""Requests to a bucket that fail are repeated, and end in one line when that does not help."""

from random import Random

import pytest

from mllm.errors import UserError
from mllm.store.bucket import Bucket

EACH = pytest.mark.parametrize("place", ["gs", "s3"], indirect=True)


@pytest.mark.parametrize("place", ["gs://", "s3://", "gs://A_B!/run"])
def test_a_url_without_a_bucket_is_refused(place):
    with pytest.raises(UserError, match=r"is no place in a bucket: give (gs|s3)://bucket/path"):
        Bucket(place).read("config.yaml")


@EACH
@pytest.mark.parametrize("fault", ["429", "503", "reset", "lost", "late"])
def test_requests_that_fail_are_repeated(url, server, fault):
    objects = Bucket(url)
    dice = Random(0)
    server.fault = lambda method, path: fault if dice.random() < 0.5 else None
    objects.write("a", b"1")
    content, generation = objects.read_generation("a")
    assert content == b"1"
    assert objects.names() == objects.entries() == ["a"]
    assert objects.replace("a", b"2", generation)
    assert objects.read("a") == b"2"
    assert objects.replace("a", b"3", generation) is None
    objects.delete(["a"])
    assert objects.read("a") is None
    assert server.faults[fault] >= 3


@EACH
def test_a_bucket_that_fails_for_good_is_one_line(url, server):
    server.fault = lambda method, path: "503"
    with pytest.raises(
        UserError, match=rf"^{url}/a: can't be read \(All 8 retry attempts failed: .*\); check the bucket"
    ):
        Bucket(url).read("a")
    server.fault = lambda method, path: "403"
    with pytest.raises(UserError, match=rf"^{url}/a: can't be written \(.*\); check the bucket and its credentials"):
        Bucket(url).write("a", b"")
