"""Every message that crosses a process boundary, and nothing else. Neither torch nor a tokenizer is imported here.

    httpserver ──GenerateReq, AbortReq, ReleaseParents──▶ router ──BatchTokenIdOut, RouterStats──▶ detokenization
    httpserver ◀──BatchStrOut, RouterStats── detokenization ──AbortReq──▶ router
    httpserver ──GetTimelines, StartProfile, StopProfile──▶ router ──QueryReply──▶ detokenization ──▶ httpserver
    httpserver ──RlQuery──▶ router ──RlReply──▶ detokenization ──▶ httpserver
    httpserver ──LoadAdapter, UnloadAdapter, ListAdapters──▶ router ──QueryReply──▶ detokenization ──▶ httpserver
    router ──Step, and the requests of worker_calls.py──▶ model worker ──StepResult, and their replies──▶ router
    launcher ──ToChild──▶ each of them ──FromChild──▶ launcher

With --dp, a dispatcher stands where the router stands, and speaks to the routers of several engines:

    dispatcher ──DispatchedReq, AbortReq, MovedReqs──▶ router ──BatchTokenIdOut, RouterStats──▶ dispatcher
                                                       router ──KvCacheEvents──▶ dispatcher
    dispatcher ──ReleaseParents──▶ router

With roles, a decode engine has prompts computed by a prefill engine, whose workers send the KV to its workers:

    dispatcher ──DispatchedReq, KvCancel──▶ decode router ──RemotePrefillRequest, KvTransferTimeout──▶ dispatcher
    dispatcher ──DispatchedReq──▶ prefill router

With --engines, the dispatcher is in a gateway, and the routers are on other machines. The same messages cross TCP. The
two introduce themselves first, and both send heartbeats:

    gateway ──GatewayHello, Heartbeat──▶ engine ──EngineHello, LinkRefused, Heartbeat, EngineDraining──▶ gateway

A Step names the requests that enter, the KV slots that each row fills, and the requests that leave. A worker knows the
tokens of its requests, so prefill, a chunk of a prompt and decode are the same message: compute the next len(slots)
tokens of a request. A request may get several tokens back, in their order: the sampled one and those that its grammar
forces after it. The next row of that request has as many slots.
"""
