import subprocess

import pytest

from tests.judges.make import Judged, make_all


@pytest.fixture(scope="session")
def made(request: pytest.FixtureRequest) -> None:
    """The files of all cases that will run, and what transformers and llama.cpp make of them."""
    wanted: dict[Judged, None] = {}
    for item in request.session.items:
        if isinstance(item, pytest.Function) and "judged" in item.fixturenames:
            judged = item.callspec.params["judged"]
            wanted[Judged(judged.case)] = None
            if judged.type != "f32":
                wanted[judged] = wanted[Judged(judged.case, judged.type, twin=True)] = None
    # Quantized files are made of others.
    for stage in (0, 1, 2):
        some = [each for each in wanted if (each.type != "f32") + each.twin == stage]
        try:
            make_all(some)
        except subprocess.CalledProcessError:
            pytest.skip("pip cannot fetch llama.cpp's converter and engine")
