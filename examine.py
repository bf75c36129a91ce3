"""What `crossdock doctor` runs in processes of their own: a look at the devices, and one side of a transport's trial.

A library may be missing, or end the process; whoever started it reads why from its standard error.
"""

import os
import platform
import secrets
import time
from contextlib import suppress
from ctypes import CDLL, byref, c_int, c_void_p, create_string_buffer
from importlib.metadata import PackageNotFoundError, version

import zmq

from .core.block_pool import BlockPool
from .core.kv_layout import KvLayout
from .core.mailbox import Mailbox
from .core.messages import Hello, Incarnation, Peer, Peers, Role, WorkerCard
from .deploy.findings import Devices, Gpu
from .kvtransfer.links import Links
from .kvtransfer.offers import Offers, Owner, offers_of_gpu, offers_of_host
from .kvtransfer.pool_bytes import PoolBytes, PoolMemory
from .kvtransfer.shm import allocate_shared
from .kvtransfer.ucx_lanes import active_rdma_ports

LAYOUT = KvLayout(num_layers=8, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
NUM_BLOCKS = 128
"""64 MiB, of which a probe borrows 4."""
NUM_GROUPS = 1
LEASE_SECONDS = 10.0
HELLO_SECONDS = 0.2
MAX_SECONDS = 60.0

NVML_P2P_CAPS_INDEX_NVLINK = 2
"""Of ``nvml.h``; its functions return 0 when they succeed, and 0 is the status of a pair that is linked."""


# --- devices -----------------------------------------------------------------------------------------


def look_at_devices() -> Devices:
    found: dict[str, object] = {"python": platform.python_version(), "rdma_ports": active_rdma_ports()}
    for look in (_look_with_torch, _look_with_ucx):
        found |= look()
    return Devices(**found)  # type: ignore[arg-type]


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _look_with_torch() -> dict[str, object]:
    try:
        import torch
    except (ImportError, OSError) as error:  # a library of CUDA that is not there is an OSError
        return {"torch": _version_of("torch"), "torch_error": str(error)}
    found: dict[str, object] = {"torch": str(torch.__version__), "cuda": torch.version.cuda or ""}
    found["triton"] = _version_of("triton")
    if torch.cuda.is_available():
        found |= {"gpus": [_gpu(number) for number in range(torch.cuda.device_count())], "driver": _driver_version()}
    return found


def _gpu(number: int) -> Gpu:
    import torch

    free, total = torch.cuda.mem_get_info(number)
    others = [other for other in range(torch.cuda.device_count()) if other != number]
    reaches = [other for other in others if torch.cuda.can_device_access_peer(number, other)]
    nvlinks = [other for other in reaches if _is_nvlinked(_uuid(number), _uuid(other))]
    return Gpu(torch.cuda.get_device_name(number), free, total, reaches, nvlinks)


def _uuid(number: int) -> str:
    import torch

    return f"GPU-{torch.cuda.get_device_properties(number).uuid}"


def _nvml() -> CDLL | None:
    """NVIDIA's management library, which comes with the driver."""
    try:
        library = CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


def _driver_version() -> str:
    library, text = _nvml(), create_string_buffer(80)
    if library is None or library.nvmlSystemGetDriverVersion(text, len(text)):
        return ""
    return text.value.decode()


def _is_nvlinked(one: str, other: str) -> bool:
    library = _nvml()
    handles, status = (c_void_p(), c_void_p()), c_int(-1)
    if library is None:
        return False
    for uuid, handle in zip((one, other), handles, strict=True):
        if library.nvmlDeviceGetHandleByUUID(uuid.encode(), byref(handle)):
            return False
    failed = library.nvmlDeviceGetP2PStatus(*handles, NVML_P2P_CAPS_INDEX_NVLINK, byref(status))
    return not failed and status.value == 0


def _look_with_ucx() -> dict[str, object]:
    try:
        from .kvtransfer.ucx_port import Port, ucx_version
    except (ImportError, OSError) as error:
        return {"ucx_error": str(error)}
    port = Port(b"")
    return {"ucx": ucx_version(), "ucx_lanes": port.available_lanes, "ucx_tls": port.allowed_transports}


# --- one side of a trial -----------------------------------------------------------------------------


class Side:
    """A worker without an engine: a pool, one transport, and links; ``device`` is ``cpu`` or ``cuda:N``.

    Raises ``ValueError`` if the transport does not reach that memory.
    """

    def __init__(self, role: Role, device: str, transport: str, router_address: str) -> None:
        self._mailbox = Mailbox("127.0.0.1", 0, Incarnation(secrets.token_hex(8)))
        self._router = Peer(router_address, Incarnation(""))
        me, post = self._mailbox.peer, self._mailbox.send
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        owner = Owner(me, "127.0.0.1", b"doctor", LEASE_SECONDS, lambda: os.eventfd_write(self._wake, 1))
        memory, offers = _pool_in_host(owner) if device == "cpu" else _pool_on_gpu(owner, device)
        if transport not in offers:
            raise ValueError(f"{transport} is not installed, or not for {'host' if device == 'cpu' else 'GPU'} memory")
        made = offers[transport]()
        self._card = WorkerCard(
            role=role,
            model="doctor",
            layout=LAYOUT,
            num_blocks=NUM_BLOCKS,
            max_model_len=1,
            max_num_seqs=1,
            vocab_size=1,
            num_layer_groups=NUM_GROUPS,
            transports=(made.card,),
        )
        self._links = Links(me, self._card, [made], BlockPool(NUM_BLOCKS), memory, post, LEASE_SECONDS)
        self._poller = zmq.Poller()
        for source in (self._mailbox.poll_socket, self._wake, *(inbox.poll_socket for inbox in self._links.inboxes)):
            self._poller.register(source, zmq.POLLIN)

    def run(self) -> None:
        """Until whoever started this ends it, or `MAX_SECONDS` have passed."""
        begun = next_hello = time.monotonic()
        is_known = False
        while (now := time.monotonic()) < begun + MAX_SECONDS:
            if not is_known and now >= next_hello:
                self._mailbox.send(self._router, Hello(card=self._card))
                next_hello = now + HELLO_SECONDS
            self._links.wait(self._poller, 0.01)
            with suppress(BlockingIOError):  # something else woke us
                os.eventfd_read(self._wake)
            is_known = self._listen(time.monotonic()) or is_known

    def _listen(self, now: float) -> bool:
        """True when told of the other side."""
        is_told = False
        for mailbox in (self._mailbox, *self._links.inboxes):
            while (delivery := mailbox.receive()) is not None:
                if isinstance(delivery.message, Peers):
                    self._links.update(delivery.sender, delivery.message.workers, now)
                    is_told = True
                else:
                    self._links.handle(delivery, now)
        self._links.sweep(now)
        return is_told


def _pool_in_host(owner: Owner) -> tuple[PoolMemory, Offers]:
    shared = allocate_shared(NUM_BLOCKS * LAYOUT.block_bytes)
    pool = PoolBytes(shared.memory, NUM_BLOCKS, LAYOUT, NUM_GROUPS)
    return pool, offers_of_host(pool, shared, owner)


def _pool_on_gpu(owner: Owner, device: str) -> tuple[PoolMemory, Offers]:
    import torch

    from .kvtransfer.device_pool import DevicePool  # triton, which only machines with a GPU have
    from .model.device_stream import CudaStream

    gpu = torch.device(device)
    torch.cuda.set_device(gpu)
    tensor = torch.zeros(NUM_BLOCKS, LAYOUT.block_bytes, dtype=torch.uint8, device=gpu)
    torch.cuda.synchronize(gpu)
    pool = DevicePool(tensor, LAYOUT, NUM_GROUPS, CudaStream(gpu))
    return pool, offers_of_gpu(pool, owner)
