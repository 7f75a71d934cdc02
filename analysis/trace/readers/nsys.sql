-- Of Nsight Systems, as `nsys export --type sqlite` and `nsys stats` write it.  Its user guide describes the tables
-- ("SQLite Schema Reference"); those of 2025 and 2026 (schema 3.24) were read, and columns that came or went since 2020
-- are optional.  globalPid and globalTid have the numbers of process and thread in fields of 24 bits.

-- reads CUPTI_ACTIVITY_KIND_KERNEL: start! end! deviceId streamId correlationId globalPid demangledName shortName
-- reads CUPTI_ACTIVITY_KIND_MEMCPY: start! end! deviceId streamId correlationId globalPid copyKind srcKind dstKind
-- reads CUPTI_ACTIVITY_KIND_MEMSET: start! end! deviceId streamId correlationId globalPid
-- reads CUPTI_ACTIVITY_KIND_GRAPH_TRACE: globalPid
-- reads CUPTI_ACTIVITY_KIND_RUNTIME: start! end! globalTid correlationId nameId!
-- reads NVTX_EVENTS: start! end! eventType! text textId globalTid domainId
-- reads StringIds: id! value!
-- reads TARGET_INFO_GPU: id name smCount totalMemory computeMajor computeMinor
-- reads TARGET_INFO_SESSION_START_TIME: utcEpochNs
-- reads TARGET_INFO_SYSTEM_ENV: name value
-- reads DIAGNOSTIC_EVENT: timestamp severity text
-- reads META_DATA_CAPTURE: name value

CREATE TEMP VIEW kernels AS
SELECT start, COALESCE("end", -1) AS "end", COALESCE(value, 'unnamed kernel') AS name,
    COALESCE((globalPid >> 24) & 0xFFFFFF, -1) AS process, COALESCE(deviceId, -1) AS device,
    COALESCE(streamId, -1) AS stream, COALESCE(correlationId, -1) AS correlation
FROM CUPTI_ACTIVITY_KIND_KERNEL LEFT JOIN StringIds ON id = COALESCE(demangledName, shortName);

-- In the words of torch.profiler, by the enumerations of CUPTI
CREATE TEMP VIEW copies AS
SELECT start, COALESCE("end", -1) AS "end",
    'Memcpy ' || CASE copyKind WHEN 1 THEN 'HtoD' WHEN 2 THEN 'DtoH' WHEN 3 THEN 'HtoA' WHEN 4 THEN 'AtoH'
        WHEN 5 THEN 'AtoA' WHEN 6 THEN 'AtoD' WHEN 7 THEN 'DtoA' WHEN 8 THEN 'DtoD' WHEN 9 THEN 'HtoH'
        WHEN 10 THEN 'PtoP' WHEN 11 THEN 'HtoD' WHEN 12 THEN 'DtoH' WHEN 13 THEN 'DtoD' ELSE 'unknown' END
    || ' (' || CASE srcKind WHEN 0 THEN 'Pageable' WHEN 1 THEN 'Pinned' WHEN 2 THEN 'Device' WHEN 3 THEN 'Array'
        WHEN 4 THEN 'Managed' ELSE 'unknown' END
    || ' -> ' || CASE dstKind WHEN 0 THEN 'Pageable' WHEN 1 THEN 'Pinned' WHEN 2 THEN 'Device' WHEN 3 THEN 'Array'
        WHEN 4 THEN 'Managed' ELSE 'unknown' END || ')' AS name,
    COALESCE((globalPid >> 24) & 0xFFFFFF, -1) AS process, COALESCE(deviceId, -1) AS device,
    COALESCE(streamId, -1) AS stream, COALESCE(correlationId, -1) AS correlation
FROM CUPTI_ACTIVITY_KIND_MEMCPY;

CREATE TEMP VIEW sets AS
SELECT start, COALESCE("end", -1) AS "end", 'Memset (Device)' AS name,
    COALESCE((globalPid >> 24) & 0xFFFFFF, -1) AS process, COALESCE(deviceId, -1) AS device,
    COALESCE(streamId, -1) AS stream, COALESCE(correlationId, -1) AS correlation
FROM CUPTI_ACTIVITY_KIND_MEMSET;

-- Without the version of a function: cudaLaunchKernel_v7000
CREATE TEMP TABLE functions(id INTEGER PRIMARY KEY, name TEXT);

INSERT INTO functions
SELECT id, CASE WHEN value GLOB '*_v[0-9]*' THEN substr(value, 1, instr(value, '_v') - 1) ELSE value END FROM StringIds
WHERE id IN (SELECT nameId FROM CUPTI_ACTIVITY_KIND_RUNTIME);

CREATE TEMP VIEW calls AS
SELECT start, COALESCE("end", -1) AS "end", name, COALESCE((globalTid >> 24) & 0xFFFFFF, -1) AS process,
    COALESCE(globalTid & 0xFFFFFF, -1) AS tid, COALESCE(correlationId, -1) AS correlation
FROM CUPTI_ACTIVITY_KIND_RUNTIME LEFT JOIN functions ON id = nameId;

-- Pushed (59) and started (60) ranges.  Those of libraries, most with domains (75) of their own, are no parts of the
-- program.
CREATE TEMP VIEW ranges AS
SELECT start, COALESCE("end", -1) AS "end", CAST(COALESCE(text, value) AS TEXT) AS name,
    COALESCE((globalTid >> 24) & 0xFFFFFF, -1) AS process, COALESCE(globalTid & 0xFFFFFF, -1) AS tid
FROM NVTX_EVENTS LEFT JOIN StringIds ON id = textId
WHERE eventType IN (59, 60) AND COALESCE(text, value) NOT GLOB 'nccl[A-Z]*' AND COALESCE(domainId, 0) NOT IN (
    SELECT D.domainId FROM NVTX_EVENTS D LEFT JOIN StringIds T ON T.id = D.textId
    WHERE D.eventType = 75 AND D.domainId > 0 AND COALESCE(D.text, T.value) IN ('NCCL', 'CCCL', 'cuBLAS', 'cuDNN'));

CREATE TEMP VIEW hosts AS
SELECT MAX((SELECT COUNT(DISTINCT globalPid >> 48) FROM CUPTI_ACTIVITY_KIND_KERNEL),
    (SELECT COUNT(DISTINCT value) FROM TARGET_INFO_SYSTEM_ENV WHERE name = 'Hostname')) AS n;

CREATE TEMP VIEW about AS
SELECT (SELECT value FROM TARGET_INFO_SYSTEM_ENV WHERE name = 'Hostname') AS host,
    (SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME) AS base, NULL AS rank, NULL AS world_size, -1 AS process;

CREATE TEMP VIEW devices AS
SELECT name, smCount AS numSms, totalMemory AS totalGlobalMem, computeMajor, computeMinor
FROM TARGET_INFO_GPU ORDER BY id NOT IN (SELECT deviceId FROM CUPTI_ACTIVITY_KIND_KERNEL), id;

-- What nsys itself noted of CUDA, as warnings (2) and errors (3); that nothing came is no reason for it
CREATE TEMP VIEW notes AS
SELECT text FROM DIAGNOSTIC_EVENT
WHERE severity IN (2, 3) AND (text LIKE '%CUDA%' OR text LIKE '%CUPTI%' OR text LIKE '%GPU performance counters%')
    AND text NOT LIKE 'No CUDA events collected%'
GROUP BY text ORDER BY MIN(timestamp);

CREATE TEMP VIEW cuda_was_traced AS
SELECT COUNT(*) > 0 AS is_so FROM META_DATA_CAPTURE
WHERE name = 'CAPTURE_EVENT_TYPE' AND value LIKE 'cuda%' OR name LIKE '%COLLECT_CUDA_TRACE' AND value = 'true';

CREATE TEMP VIEW others AS
SELECT 'executions of whole graphs (--cuda-graph-trace=node records their kernels)' AS name,
    COALESCE((globalPid >> 24) & 0xFFFFFF, -1) AS process
FROM CUPTI_ACTIVITY_KIND_GRAPH_TRACE;
