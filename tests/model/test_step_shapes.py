"""The few sizes that steps on a GPU come in."""

from crossdock.model.step_shapes import StepShape, StepShapes


def test_decode_steps_are_padded_to_powers_of_two_and_then_to_eights() -> None:
    shapes = StepShapes(40)
    assert shapes.decode_ladder == [1, 2, 4, 8, 16, 24, 32, 40]
    assert [shapes.padded(n, []).num_decodes for n in (1, 3, 8, 9, 40)] == [1, 4, 8, 16, 40]
    assert StepShapes(3).decode_ladder == [1, 2, 3]
    assert StepShapes(256).decode_ladder[-3:] == [240, 248, 256]


def test_a_step_of_few_short_prompts_is_padded_to_a_shape_that_has_a_graph() -> None:
    shapes = StepShapes(256)
    short = shapes.padded(0, [32, 7])
    assert short == StepShape(0, 4, 64, is_short=True)
    assert short in shapes.graphed()
    assert shapes.padded(0, [32] * 4) in shapes.graphed()


def test_a_step_of_prompts_alone_is_padded_to_a_shape_that_has_a_graph_up_to_1024_tokens() -> None:
    shapes = StepShapes(256)
    assert shapes.padded(0, [33]) == StepShape(0, 4, 64, is_short=False)
    assert shapes.padded(0, [512, 8]) == StepShape(0, 4, 640, is_short=False)
    assert shapes.padded(0, [64] * 5) == StepShape(0, 32, 512, is_short=False)
    assert shapes.padded(0, [8] * 5) == StepShape(0, 32, 256, is_short=False)
    assert shapes.padded(0, [2] * 33) == StepShape(0, 256, 256, is_short=False)
    assert all(
        shapes.padded(0, tokens) in shapes.graphed() for tokens in ([33], [512, 8], [1024], [64] * 5, [32, 33] * 15)
    )
    assert shapes.padded(0, [1025]) == StepShape(0, 4, 1025, is_short=False)


def test_other_prompts_keep_their_tokens() -> None:
    shapes = StepShapes(256)
    assert shapes.padded(3, [33]) == StepShape(4, 4, 37, is_short=False)
    assert shapes.padded(3, [32, 7]) == StepShape(4, 4, 43, is_short=True)
    assert shapes.padded(3, [8] * 5) == StepShape(4, 32, 44, is_short=False)


def test_graphs_are_as_few_as_start_up_can_bear_and_the_largest_come_first() -> None:
    shapes = StepShapes(256).graphed()
    assert [len([s for s in shapes if s.num_prompts == number]) for number in (0, 4, 32, 256)] == [35, 12, 3, 3]
    assert [shape.num_tokens for shape in shapes[:4]] == [1024, 1024, 1024, 768]


def test_no_step_has_more_sequences_than_the_largest_shapes_together() -> None:
    for limit in (1, 2, 5, 256):
        shapes = StepShapes(limit)
        for num_decodes in range(limit + 1):
            shape = shapes.padded(num_decodes, [9] * (limit - num_decodes))
            assert shape.num_sequences <= shapes.max_sequences
            assert shape.num_tokens >= num_decodes + 9 * (limit - num_decodes)
