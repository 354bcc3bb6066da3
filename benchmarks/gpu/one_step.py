"""One decode step of 16 requests, marked for Nsight Compute; run by part (c)."""

from __future__ import annotations

import sys

import torch
from load import Decoding, open_engine
from part import Setting

if __name__ == "__main__":
    engine = open_engine(Setting("cuda:0", sys.argv[1], 0.0, is_dry=False))
    decoding = Decoding(engine, batch=16, context=512)
    decoding.run(2)
    torch.cuda.cudart().cudaProfilerStart()
    decoding.run(1)
    torch.cuda.cudart().cudaProfilerStop()
