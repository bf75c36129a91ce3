"""The start of a step on the device: seats, the step's own tables, and pending ids."""

import os

import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

from crossdock.kernels.step_inputs import BLOCKS_AT_ONCE, begin_step, seat_blocks  # noqa: E402

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")


def ints(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def test_runs_of_blocks_go_to_their_seats_and_nowhere_else() -> None:
    long = BLOCKS_AT_ONCE + 9
    seats = torch.full((3, long + 4), -1, dtype=torch.int32, device=DEVICE)
    blocks = torch.arange(100, 100 + long + 2, dtype=torch.int32, device=DEVICE)
    seat_blocks(seats, ints([2, 1, 2, 0], [0, 3, long, 2]), blocks)
    assert seats[2].tolist() == [-1, 100, 101, *[-1] * (long + 1)]
    assert seats[0].tolist() == [-1, -1, -1, *range(102, 102 + long), -1]
    assert seats[1].unique().tolist() == [-1]


def test_a_row_gets_its_seats_blocks_and_adds_its_last_one() -> None:
    last = BLOCKS_AT_ONCE + 1
    seats = torch.arange(2 * 256, dtype=torch.int32, device=DEVICE).view(2, 256)
    tables = torch.full((3, 256), -1, dtype=torch.int32, device=DEVICE)
    rows = ints([0, -1, 1, last, 7, 0, 0, 0], [1, -1, 0, 0, 8, 0, 0, 0])
    begin_step(ints(5, 6), rows, torch.zeros(1, dtype=torch.int64, device=DEVICE), seats, tables)
    assert tables[0].tolist() == [*range(256, 256 + last), 7, *[-1] * (255 - last)]
    assert tables[1].tolist() == [8, *[-1] * 255]
    assert tables[2].unique().tolist() == [-1]
    assert (int(seats[1, last]), int(seats[0, 0]), int(seats[0, 1])) == (7, 8, 1)


def test_pending_ids_are_filled_in_and_padded_rows_are_left_alone() -> None:
    token_ids, seats = ints(10, 0, 12, 0), torch.zeros(2, 16, dtype=torch.int32, device=DEVICE)
    tables = torch.full((3, 16), -1, dtype=torch.int32, device=DEVICE)
    sampled = torch.tensor([500, 501], device=DEVICE)
    rows = ints([0, -1, 0, 0, 3, 0, 0, 0], [3, 1, 1, 0, 4, 0, 0, 0], [0, -1, 0, -1, 0, 0, 0, 0])
    begin_step(token_ids, rows, sampled, seats, tables)
    assert token_ids.tolist() == [10, 0, 12, 501]
    assert tables[:, 0].tolist() == [3, 4, -1]
