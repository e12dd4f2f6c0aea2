"""Service level objectives: what a request must keep to count, and what a stage must keep to hold.

    ttft_p95<2s,tpot_p95<300ms      95 percent of requests see TTFT below 2 s, 95 percent TPOT below 300 ms
    ttft<2s,e2e<10s@99              99 percent of requests keep both limits

A request *meets* an objective when it completed and keeps every limit. A stage *holds* it when the share
that meets it is at least `attainment`, and each percentile named keeps its limit. A request that failed
meets nothing and stands in every percentile as infinitely late.
"""
