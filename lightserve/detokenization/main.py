"""The detokenization process."""

from __future__ import annotations

import gc

from lightserve.detokenization.manager import DetokenizationManager
from lightserve.io_struct import Ready, ToDetokenization, ToHttpserver, ToRouter
from lightserve.model_files.source import resolve
from lightserve.model_files.tokenizer import tokenizer_if_any
from lightserve.utils.channel import Receiver, Sender
from lightserve.utils.process import Boot, Parent, run_child


async def main(boot: Boot, parent: Parent) -> None:
    config = boot.config
    inbox: Receiver[ToDetokenization] = Receiver(boot.address("detokenization"), ToDetokenization)
    to_router: Sender[ToRouter] = Sender(boot.address("router"))
    to_http: list[Sender[ToHttpserver]] = [
        Sender(boot.address(f"http-{index}")) for index in range(config.http.num_processes)
    ]
    tokenizer = tokenizer_if_any(resolve(config.worker.model_dir, needs_weights=False))
    decoder = None if tokenizer is None else tokenizer.decoder
    manager = DetokenizationManager(decoder, inbox, to_router, to_http)
    parent.send(Ready())
    gc.freeze()  # objects that exist now live until the end: no collection needs to visit them
    await manager.run()


if __name__ == "__main__":
    run_child("detokenizer", main)
