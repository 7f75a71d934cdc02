-- Of rocprofv3 (ROCm 7), by rocpd_tables.sql (schema 3) and marker_views.sql in source/share/rocprofiler-sdk-rocpd of
-- rocprofiler-sdk.  Its views for readers, such as kernels, leave out what lacks an event or the name of a region.
-- A kernel and its call have the same stack_id.  A category is a string or, in some versions, has a table of its own.

-- reads rocpd_kernel_dispatch: guid pid agent_id kernel_id! queue_id stream_id start! end! event_id
-- reads rocpd_memory_copy: guid pid start! end! name_id dst_agent_id src_agent_id queue_id stream_id event_id
-- reads rocpd_region: guid pid tid start! end! name_id! event_id
-- reads rocpd_event: id! guid category_id stack_id extdata
-- reads rocpd_string: id! guid string!
-- reads rocpd_info_category: id guid name
-- reads rocpd_info_kernel_symbol: id! guid display_name kernel_name
-- reads rocpd_info_agent: id! guid type type_index name product_name extdata
-- reads rocpd_info_node: machine_id hostname
-- reads rocpd_info_process: id environment

CREATE TEMP VIEW kernels AS
SELECT start, COALESCE("end", -1) AS "end",
    COALESCE(NULLIF(S.display_name, ''), S.kernel_name, 'unnamed kernel') AS name, COALESCE(pid, -1) AS process,
    COALESCE(A.type_index, agent_id, -1) AS device, COALESCE(stream_id, queue_id, -1) AS stream,
    COALESCE(E.stack_id, -1) AS correlation
FROM rocpd_kernel_dispatch K
    LEFT JOIN rocpd_info_kernel_symbol S ON S.id = K.kernel_id AND S.guid IS K.guid
    LEFT JOIN rocpd_info_agent A ON A.id = K.agent_id AND A.guid IS K.guid
    LEFT JOIN rocpd_event E ON E.id = K.event_id AND E.guid IS K.guid;

CREATE TEMP VIEW copies AS
SELECT start, COALESCE("end", -1) AS "end",
    CASE WHEN string LIKE '%HOST_TO_DEVICE' THEN 'Memcpy HtoD' WHEN string LIKE '%DEVICE_TO_HOST' THEN 'Memcpy DtoH'
        WHEN string LIKE '%DEVICE_TO_DEVICE' THEN 'Memcpy DtoD' ELSE COALESCE(string, 'Memcpy') END AS name,
    COALESCE(pid, -1) AS process,
    COALESCE(CASE D.type WHEN 'GPU' THEN D.type_index ELSE S.type_index END, -1) AS device,
    COALESCE(stream_id, queue_id, -1) AS stream, COALESCE(E.stack_id, -1) AS correlation
FROM rocpd_memory_copy C
    LEFT JOIN rocpd_string N ON N.id = C.name_id AND N.guid IS C.guid
    LEFT JOIN rocpd_info_agent D ON D.id = C.dst_agent_id AND D.guid IS C.guid
    LEFT JOIN rocpd_info_agent S ON S.id = C.src_agent_id AND S.guid IS C.guid
    LEFT JOIN rocpd_event E ON E.id = C.event_id AND E.guid IS C.guid;

CREATE TEMP VIEW sets AS SELECT * FROM copies WHERE 0;  -- are kernels: __amd_rocclr_fillBufferAligned

CREATE TEMP VIEW regions AS
SELECT start, COALESCE("end", -1) AS "end", N.string AS name, COALESCE(pid, -1) AS process, COALESCE(tid, -1) AS tid,
    COALESCE(E.stack_id, -1) AS correlation, COALESCE(I.name, C.string) AS category,
    CASE WHEN json_valid(E.extdata) THEN json_extract(E.extdata, '$.message') END AS message
FROM rocpd_region R
    LEFT JOIN rocpd_string N ON N.id = R.name_id AND N.guid IS R.guid
    LEFT JOIN rocpd_event E ON E.id = R.event_id AND E.guid IS R.guid
    LEFT JOIN rocpd_info_category I ON I.id = E.category_id AND I.guid IS R.guid
    LEFT JOIN rocpd_string C ON C.id = E.category_id AND C.guid IS R.guid;

CREATE TEMP VIEW calls AS
SELECT start, "end", name, process, tid, correlation FROM regions WHERE category LIKE 'HIP%';

CREATE TEMP VIEW ranges AS
SELECT start, "end", CAST(COALESCE(message, name) AS TEXT) AS name, process, tid FROM regions
WHERE category LIKE 'MARKER%' AND COALESCE(message, name) NOT LIKE 'roctx%';

CREATE TEMP VIEW hosts AS SELECT COUNT(DISTINCT machine_id) AS n FROM rocpd_info_node;

CREATE TEMP VIEW about AS
SELECT (SELECT hostname FROM rocpd_info_node) AS host, 0 AS base, id AS process,
    CAST(json_extract(environment, '$.RANK') AS INTEGER) AS rank,
    CAST(json_extract(environment, '$.WORLD_SIZE') AS INTEGER) AS world_size
FROM rocpd_info_process WHERE json_valid(environment);

CREATE TEMP VIEW devices AS
SELECT COALESCE(NULLIF(product_name, ''), name) AS name, json_extract(extdata, '$.cu_count') AS numSms,
    json_extract(extdata, '$.mem_banks[0].size_in_bytes') AS totalGlobalMem,
    json_extract(extdata, '$.gfx_target_version') / 10000 AS computeMajor,
    json_extract(extdata, '$.gfx_target_version') / 100 % 100 AS computeMinor
FROM rocpd_info_agent WHERE type = 'GPU' AND json_valid(extdata)
ORDER BY id NOT IN (SELECT agent_id FROM rocpd_kernel_dispatch), id;

CREATE TEMP VIEW others AS SELECT NULL AS name, -1 AS process WHERE 0;
