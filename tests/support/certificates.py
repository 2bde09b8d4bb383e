"""Certificates made at test time with the openssl command: authorities, and what they sign."""

from __future__ import annotations

import atexit
import functools
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdserve.service.tls_config import TlsConfig

WORKER_NAME = "worker.test"

needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="the openssl command makes the certificates, and isn't here"
)


@dataclass(frozen=True, slots=True)
class Signed:
    """A certificate and its key, in PEM files."""

    cert: Path
    key: Path


class Authority:
    """Signs certificates for names."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self.cert, self._key = folder / f"{name}.pem", folder / f"{name}.key"
        _openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-days", "2", "-subj", f"/CN={name}", "-keyout", str(self._key), "-out", str(self.cert)),
        )

    def sign(self, name: str, file: str = "", days: int = 2) -> Signed:
        """For a DNS name. file: of the certificate, if not as the name. days: −1 = it expired yesterday."""
        made = Signed(self._folder / f"{file or name}.pem", self._folder / f"{file or name}.key")
        request, extra = self._folder / "request", self._folder / "extra"
        _openssl(
            *("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-subj", f"/CN={name}", "-keyout", str(made.key), "-out", str(request)),
        )
        extra.write_text(f"subjectAltName=DNS:{name}\n")
        _openssl(
            *("x509", "-req", "-in", str(request), "-CA", str(self.cert), "-CAkey", str(self._key)),
            *("-CAcreateserial", "-days", str(days), "-extfile", str(extra), "-out", str(made.cert)),
        )
        return made


@functools.cache
def link_certificates() -> TlsConfig:
    """Of workers of one cluster, made once; skips the test where they can't be."""
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command makes the certificates, and isn't here")
    folder = Path(tempfile.mkdtemp(prefix="pdcerts"))
    atexit.register(shutil.rmtree, folder)
    authority = Authority(folder, "cluster")
    return link_tls(authority, authority.sign(WORKER_NAME))


def link_tls(authority: Authority, shown: Signed, worker_name: str = WORKER_NAME) -> TlsConfig:
    return TlsConfig(
        cert_file=str(shown.cert),
        key_file=str(shown.key),
        ca_file=str(authority.cert),
        worker_name=worker_name,
    )


def _openssl(*words: str) -> None:
    subprocess.run(("openssl", *words), check=True, capture_output=True, timeout=60)
