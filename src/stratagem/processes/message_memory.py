"""Memory in which the large buffers of one message travel between two processes."""

import os
from typing import final

ALIGN = 64


@final
class Outgoing:
    """Large buffers of one message, one after the other in anonymous shared memory."""

    def __init__(self, buffers: list[memoryview]) -> None:
        self.num_bytes = sum(padded(len(buffer)) for buffer in buffers)
        self.descriptor = -1
        if not self.num_bytes:
            return
        self.descriptor = os.memfd_create("stratagem-message", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, self.num_bytes)
            offset = 0
            for buffer in buffers:
                self._write(buffer, offset)
                offset += padded(len(buffer))
        except BaseException:
            self.close()
            raise

    def _write(self, buffer: memoryview, offset: int) -> None:
        # Written, not mapped: a lack of memory is an error, and no page is cleared first.
        while buffer:
            written = os.pwrite(self.descriptor, buffer, offset)
            buffer, offset = buffer[written:], offset + written

    def close(self) -> None:
        """Lets go of the memory; who has received it keeps it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def padded(num_bytes: int) -> int:
    """The room that so many bytes take."""
    return -(-num_bytes // ALIGN) * ALIGN
