"""A process that speaks: requests on standard input, samples on standard output.

espeak-ng keeps oscillators and random numbers from one utterance to the next and has no way to
reset them. So only a new process gives the same samples again, bit by bit. This file is run by its
path, without the package, and uses only Python's standard library.

    python espeak.py LIBRARY DATA

A request is a line of JSON, `[voice, words a minute, pitch, gap in 10 ms, text]`. The first answer
is the sample rate; then each request's is the number of samples, or -1 if the voice is unknown, and
the samples, all in native byte order: int32 and int16.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import sys
from typing import Any

_SYNCHRONOUS = 2  # AUDIO_OUTPUT_SYNCHRONOUS: espeak_Synth returns when all is said
_DO_NOT_EXIT = 0x8000  # report failure instead of ending the process
_RATE, _PITCH, _GAP = 1, 3, 7  # espeak_PARAMETER
_UTF8, _PHONEMES = 1, 0x100  # [[...]] in the text are phonemes

_Callback = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p
)


def main(library: str, data: str) -> int:
    speech = ctypes.CDLL(library)
    # espeak-ng cuts paths of more than 160 characters, so it gets a short one.
    os.chdir(os.path.dirname(data))
    rate = speech.espeak_Initialize(_SYNCHRONOUS, 0, os.path.basename(data).encode(), _DO_NOT_EXIT)
    if rate <= 0:
        print(f"espeak-ng cannot begin with the data in {data}", file=sys.stderr)
        return 1
    # Breath is random, and seeded with the time of day.
    speech.espeak_ng_SetRandSeed(ctypes.c_long(1))
    heard: list[bytes] = []

    def collect(samples: Any, count: int, _events: Any) -> int:
        if samples and count > 0:
            heard.append(ctypes.string_at(samples, 2 * count))
        return 0

    callback = _Callback(collect)
    speech.espeak_SetSynthCallback(callback)

    def say(words: int, pitch: int, gap: int, text: str) -> bytes:
        heard.clear()
        for parameter, value in ((_RATE, words), (_PITCH, pitch), (_GAP, gap)):
            speech.espeak_SetParameter(parameter, value, 0)
        encoded = text.encode()
        size = ctypes.c_size_t(len(encoded) + 1)
        flags = _UTF8 | _PHONEMES
        speech.espeak_Synth(encoded, size, 0, 0, 0, flags, None, None)
        speech.espeak_Synchronize()
        return b"".join(heard)

    output = sys.stdout.buffer
    output.write(struct.pack("=i", rate))
    output.flush()
    for line in sys.stdin:
        voice, *how = json.loads(line)
        if speech.espeak_SetVoiceByName(voice.encode()) != 0:
            output.write(struct.pack("=i", -1))
        else:
            samples = say(*how)
            output.write(struct.pack("=i", len(samples) // 2) + samples)
        output.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
