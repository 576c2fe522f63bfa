"""A recording is finished in a thread, as when the main one cannot hear a signal, and the job fails meanwhile.

``fail_while_writing.py FOLDER``: writing takes a second, and says so.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import torch.distributed as dist

from headway.recording.recorder import Recorder, RecordOptions


def main() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    recorder = Recorder(RecordOptions(folder=Path(sys.argv[1])))
    recorder.attach()

    writing = threading.Event()

    def write(self: Recorder) -> None:
        writing.set()
        time.sleep(1)
        print("written", flush=True)

    Recorder._write_status = write  # type: ignore[method-assign]
    threading.Thread(target=recorder.finish, daemon=True).start()
    writing.wait()
    raise RuntimeError("the job failed")


if __name__ == "__main__":
    main()
