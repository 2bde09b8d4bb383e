"""KV blocks move between processes: the room of the links between a prefill worker P and a decode worker D.

One hand-off, as it goes over one link (times run down; the names in brackets are messages.py, to and from the
worker's engine; the others are frames):

    P's engine            P: sender.py                        D: receiver.py, intake.py           D's engine
        |                      |                                     |<------------ [ExpectLease] ----| grant, block ids
        |-- [OpenLease] ------>|                                     |                                |
        |-- [Offer 2 blocks] ->|---- READY{lease, upto 2} ---------->|                                |
        |  next chunk runs     |<--- PULL{pieces of blocks 0, 1} ----|
        |                      |---- DATA, raw bytes, xxh3 --------->| into D's pool, bitmap, [PullProgress]
        |-- [Offer 1 block] -->|---- READY{lease, upto 3} ---------->|
        |-- [CommitLease] ---->|---- COMMIT{3 blocks} -------------->|
        |                      |<--- PULL, DATA -------------------->|
        |                      |<--- ACK ----------------------------| each block written exactly once
        |<- [LeaseClosed] -----|---- CONFIRM ----------------------->| P held every block without a break
        |                      |                                     |-- [HandedOff] ---------------->| it may run

Everything else is an end of the lease: P says WITHDRAW, D says FAIL, an answer stays away for lease_s, or the link
ends; then P's engine gets LeaseClosed(error) and D's gets Retired(error), each exactly once, and only then may they
move the blocks. A frame about a lease that has ended is answered STALE. So an ACK that comes too late is never
confirmed, and D never runs on blocks that P has given to somebody else.

Where things are:

    owner.py            TransferOwner: all links of one worker; the Owner that a driver runs
    wanted_links.py     which links P's routers want; when to dial again
    link.py             one link, both ends: handshake -> up -> down; keepalive
    handshake.py        HELLO, PROOF; link_facts.py: what must be equal
    sender.py           P's end of the leases of a link
    receiver.py         D's end; intake.py: how the bytes come; early_frames.py: those that overtook the engine
    lease.py            the state of one lease; lease_table.py: the live ones and the ended ids; pieces.py
    stuck_lease.py      the one log line of a lease that doesn't move
    frames.py           all frames, and what their fields may hold
    framing.py          header, msgpack body, checksum
    messages.py         what engine, loop and transfer owner say to each other
    metrics.py          what is counted
    transports/         port.py: Channel and Network; stream*.py, unix_listener.py, selector_waiter.py: sockets

All of it is synchronous and takes time from an injected Clock. Nothing here knows tensors, requests or routers.
"""
