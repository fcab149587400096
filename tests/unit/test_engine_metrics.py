"""serve_app.router.engine_metrics: many engines' pages become one that Prometheus reads."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from serve_app.router.engine_metrics import merged

PAGE = """# HELP vllm:num_requests_running Number of requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
# HELP python_gc_total Collections.
# TYPE python_gc_total counter
python_gc_total 5.0
# HELP vllm:ttft_seconds First tokens.
# TYPE vllm:ttft_seconds histogram
vllm:ttft_seconds_bucket{le="0.1",model_name="m"} 1.0
vllm:ttft_seconds_bucket{le="+Inf",model_name="m"} 3.0
vllm:ttft_seconds_count{model_name="m"} 3.0
vllm:ttft_seconds_sum{model_name="m"} 4.5
"""


def samples(page: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """All samples of a page, by Prometheus' own reader, which wants each family in one piece."""
    families = list(text_string_to_metric_families(page))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def test_every_sample_of_every_engine_is_there_with_its_model_and_replica() -> None:
    pages = [({"model": model, "replica": replica}, PAGE) for model, replica in (("a", "1"), ("a", "2"), ("b", "3"))]
    found = samples(merged(pages))
    assert len(found) == 3 * len(samples(PAGE))
    for own, page in pages:
        for (name, labels), value in samples(page).items():
            assert found[name, labels | frozenset(own.items())] == value


def test_kinds_are_kept() -> None:
    kinds = {
        family.name: family.type for family in text_string_to_metric_families(merged([({"model": "m"}, PAGE)] * 2))
    }
    assert kinds["vllm:ttft_seconds"] == "histogram"
    assert kinds["vllm:num_requests_running"] == "gauge"


def test_without_engines_the_page_is_empty() -> None:
    assert merged([]) == ""


@given(
    st.text(
        st.characters(exclude_categories=["Cs"], exclude_characters="\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"),
        max_size=20,
    )
)
def test_any_name_of_a_model_can_be_read_back(name: str) -> None:
    found = samples(merged([({"model": name}, PAGE)]))
    assert all(("model", name) in labels for _, labels in found)


@given(st.text(max_size=200))
def test_any_page_is_survived(page: str) -> None:
    merged([({"model": "m"}, page), ({"model": "m"}, PAGE)])
