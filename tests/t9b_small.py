import traceback, pathlib, sys
def f(rank, world, port):
    from tests.integrations import test_deepspeed as t
    try:
        r = t.compressed(rank, world, port, pathlib.Path("/tmp"))
        return {k: v for k, v in r.items() if k[0] != "router" and k != "router"}
    except BaseException as e:
        traceback.print_exc()
        raise RuntimeError(repr(e))
