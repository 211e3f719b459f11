"""Certificates for an embedded broker with TLS: an authority of its own, made by `openssl` on this machine."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from broker.errors import BrokerError

VALID_DAYS = 2
LIMIT_SECONDS = 30.0
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files below one directory: an authority, and what it signs for 127.0.0.1, localhost and clients."""

    directory: Path

    @classmethod
    def make(cls, directory: Path) -> Self:
        """Make an authority and a server's certificate. Raises BrokerError: there is no openssl, or it fails."""
        made = cls(directory)
        directory.mkdir(parents=True, exist_ok=True)
        authority = ["-addext", "keyUsage=critical,keyCertSign,cRLSign", "-days", str(VALID_DAYS)]
        made._openssl("req", "-x509", *_NEW_KEY, "-keyout", "authority.key", "-out", "authority.pem", *authority)
        made._sign("server", "subjectAltName=DNS:localhost,IP:127.0.0.1\nextendedKeyUsage=serverAuth\n")
        return made

    @property
    def authority(self) -> Path:
        """What clients have to trust (MARQ_SSL_CAFILE)."""
        return self.directory / "authority.pem"

    @property
    def server(self) -> Path:
        """The broker's key and certificate in one file, as Kafka reads them."""
        return self.directory / "server.pem"

    def client(self, name: str) -> Path:
        """Key and certificate of a client in one file (MARQ_SSL_CERTFILE); the broker calls it User:`name`."""
        path = self.directory / f"{name}.pem"
        if not path.exists():
            self._sign(name, "extendedKeyUsage=clientAuth\n")
        return path

    def _sign(self, name: str, extensions: str) -> None:
        at = self.directory
        (at / f"{name}.extensions").write_text(
            f"basicConstraints=CA:FALSE\nkeyUsage=digitalSignature\nauthorityKeyIdentifier=keyid\n{extensions}"
        )
        self._openssl("req", "-new", *_NEW_KEY, "-keyout", f"{name}.key", "-out", f"{name}.request", name=name)
        signing = ["-CA", "authority.pem", "-CAkey", "authority.key", "-CAcreateserial", "-days", str(VALID_DAYS)]
        files = ["-in", f"{name}.request", "-out", f"{name}.certificate", "-extfile", f"{name}.extensions"]
        self._openssl("x509", "-req", *signing, *files, name=None)
        (at / f"{name}.pem").write_bytes((at / f"{name}.key").read_bytes() + (at / f"{name}.certificate").read_bytes())

    def _openssl(self, *arguments: str, name: str | None = "marq embedded broker") -> None:
        tool = shutil.which("openssl")
        if tool is None:
            raise BrokerError("there is no openssl on this machine, which makes the broker's certificates: install it")
        subject = [] if name is None else ["-subj", f"/CN={name}"]
        result = subprocess.run(
            [tool, *arguments, *subject],
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=LIMIT_SECONDS,
            check=False,
        )
        if result.returncode != 0:
            raise BrokerError(f"openssl {arguments[0]} failed: {result.stdout.strip()}")
