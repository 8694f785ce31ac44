"""The detokenization process."""

from __future__ import annotations

from lightserve.detokenization.manager import DetokenizationManager
from lightserve.ipc.channel import Receiver, Sender
from lightserve.ipc.process import ChildConfig, LauncherConnection, run_child
from lightserve.messages.control import Ready
from lightserve.messages.output import ToDetokenization, ToHttpserver
from lightserve.messages.request import ToRouter
from lightserve.model_files.source import resolve
from lightserve.model_files.tokenizer.tokenizer import load_tokenizer_or_none
from lightserve.utils.collector import collect_rarely


async def main(child_config: ChildConfig, launcher: LauncherConnection) -> None:
    config = child_config.config
    inbox: Receiver[ToDetokenization] = Receiver(child_config.address("detokenization"), ToDetokenization)
    to_router: Sender[ToRouter] = Sender(child_config.address("router"))
    to_http: list[Sender[ToHttpserver]] = [
        Sender(child_config.address(f"http-{index}")) for index in range(config.http.num_processes)
    ]
    trusts_code = config.worker.trust_remote_code
    tokenizer = load_tokenizer_or_none(resolve(config.worker.model_dir, needs_weights=False, trusts_code=trusts_code))
    decoder = None if tokenizer is None else tokenizer.decoder
    manager = DetokenizationManager(decoder, inbox, to_router, to_http)
    launcher.send(Ready())
    collect_rarely()
    await manager.run()


if __name__ == "__main__":
    run_child("detokenizer", main)
