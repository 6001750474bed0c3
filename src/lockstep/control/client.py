"""The end of a control channel that connects."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping

from lockstep.control import session
from lockstep.control.secret import Secret
from lockstep.control.session import close_after_fork, encode, name_of, reason_of, tune
from lockstep.errors import ControlError

READ_BYTES = 64 * 1024
# For a socket: with no limit at all, it would block the thread that sends as well.
FOREVER_S = 1e8


class SilentError(ControlError):
    """Nobody answers at an address, or not in time: whoever listens there may be stopped, busy, or not there yet."""


class Client:
    """A connection to a :class:`~lockstep.control.server.Server`.

    One thread may send while another receives; several may send. Not for signal handlers: one that interrupts
    a thread which sends would wait for it for ever.

    Args:
        address: host and port of the server.
        secret: the secret that the server has, too.
        timeout_s: how long connecting and authenticating may take, and later the sending of one message.

    Raises:
        SilentError: nobody answers there in time.
        ControlError: who answers does not know the secret, or is no server.
    """

    def __init__(self, address: tuple[str, int], secret: Secret, timeout_s: float) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._received: deque[dict[str, object]] = deque()
        self._lost: ControlError | None = None
        deadline = time.monotonic() + timeout_s
        try:
            # The system would take the remainder.
            if not 0 < address[1] <= 65535:
                raise ValueError("ports are 1 to 65535")
            self._socket = socket.create_connection(address, timeout_s)
        except (OSError, OverflowError, ValueError) as error:
            # ValueError: a host that is no name, too.
            raise SilentError(
                f"Cannot reach {name_of(address)}: {reason_of(error)}. Check that the launcher there runs, and "
                f"that nothing between the machines blocks this port."
            ) from None
        # The same connection: receiving has limits of its own.
        self._incoming = self._socket.dup()
        close_after_fork(self)
        try:
            tune(self._socket)
            greeted = self._read_exactly(session.GREETING_BYTES, deadline)
            answered = session.answer(secret, greeted)
            self._socket.sendall(answered)
            self._session = session.finish(
                secret, greeted, answered, self._read_exactly(session.PROOF_BYTES, deadline)
            )
        except TimeoutError:
            self.close()
            raise SilentError(
                f"Cannot connect to {name_of(address)}: it did not answer within {timeout_s:g} s. Check the address. "
                "Give both ends the same secret."
            ) from None
        except OSError:
            self.close()
            raise SilentError(
                f"{name_of(address)} ended the connection before it was authenticated: it has too many others, or "
                "is not a Lockstep launcher. Try again, or correct the address."
            ) from None
        except ControlError as error:
            self.close()
            raise ControlError(
                f"Cannot connect to {name_of(address)}: {error}. Check the address. Give both ends the same secret."
            ) from None
        except BaseException:
            self.close()
            raise

    def send(self, message: Mapping[str, object]) -> None:
        """Send a message.

        Raises:
            ControlError: the server is gone, or takes nothing for ``timeout_s``, or the message is not a mapping
                of JSON values of at most 1 MiB. Only after the last of these the client can still be used.
        """
        payload = encode(message)
        with self._sending:
            self._check_open()
            try:
                self._socket.settimeout(self._timeout_s)
                self._socket.sendall(self._session.writer.frame(payload))
            except TimeoutError:
                # A part of a frame may have left.
                raise self._give_up(f"it did not answer within {self._timeout_s:g} s") from None
            except OSError as error:
                raise self._give_up(reason_of(error)) from None

    def receive(self, timeout_s: float | None) -> dict[str, object] | None:
        """Return the next message; None when there is none within ``timeout_s`` (None: wait as long as it takes).

        Raises:
            ControlError: the server is gone, or its bytes are not authentic.
        """
        deadline = time.monotonic() + (FOREVER_S if timeout_s is None else timeout_s)
        with self._receiving:
            while not self._received:
                self._check_open()
                try:
                    received = self._read(READ_BYTES, deadline)
                    self._received.extend(self._session.reader.messages(received))
                except (TimeoutError, BlockingIOError) as error:
                    # The system's own, of a machine that vanished, has a number.
                    if isinstance(error, BlockingIOError) or error.errno is None:
                        return None
                    self._give_up(reason_of(error))
                except (OSError, ControlError) as error:
                    self._give_up(reason_of(error))
            return self._received.popleft()

    def close(self) -> None:
        """Leave. A thread that waits in :meth:`receive` gets a ControlError. Closing again does nothing."""
        with contextlib.suppress(OSError):
            # Wakes the thread that waits.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._close_in_child()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_details: object) -> None:
        self.close()

    def _read(self, limit: int, deadline: float) -> bytes:
        self._incoming.settimeout(max(deadline - time.monotonic(), 0.0))
        received = self._incoming.recv(limit)
        if not received:
            raise ConnectionError("the other end closed it")
        return received

    def _read_exactly(self, size: int, deadline: float) -> bytes:
        received = b""
        while len(received) < size:
            # Not 0, with which the socket would not wait at all.
            received += self._read(size - len(received), max(deadline, time.monotonic() + 0.001))
        return received

    def _check_open(self) -> None:
        if self._lost is not None:
            raise self._lost
        if self._socket.fileno() < 0:
            raise ControlError(f"The connection to {name_of(self.address)} is closed. Make a new client.")

    def _give_up(self, why: str) -> ControlError:
        # close() was called while this thread waited.
        if self._socket.fileno() < 0:
            why = "it was closed here"
        self.close()
        self._lost = ControlError(
            f"The connection to {name_of(self.address)} is lost: {why}. Read what the launcher there reported."
        )
        return self._lost

    def _close_in_child(self) -> None:
        # No shutdown: that would end the parent's connection, too.
        self._socket.close()
        self._incoming.close()
